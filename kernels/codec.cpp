// Block codec on a CPU: the native half of twinbed.kernels. Formats: layout.py. Twin in plain torch: reference.py.
//
// Both give equal bits, so every float operation here is one IEEE operation of the twin: build with
// -ffp-contract=off and never with -ffast-math, which would also let NaN through the poison check.
// No globals and no libraries: any number of threads may call in, with the interpreter's lock released.

#include <cfloat>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };  // as in codec.py

// 1.5 * 2^23. Adding it to |v| < 2^22 rounds v to the nearest even integer, left in the sum's low bits.
constexpr float kRound = 12582912.0f;
// A block below kTiny is scaled up first: qmax / absmax would overflow. Both are powers of two: exact.
constexpr float kTiny = 0x1p-60f;
constexpr float kLift = 0x1p64f;
// Largest magnitude that a scale is taken from: qmax * scale must not round up to infinity.
constexpr float kLargest = 0x1.fffff8p127f;
constexpr uint32_t kQuietNaN = 0x7fc00000u;

inline uint32_t bits_of(float v) {
  uint32_t u;
  std::memcpy(&u, &v, 4);
  return u;
}

inline float float_of(uint32_t u) {
  float v;
  std::memcpy(&v, &u, 4);
  return v;
}

// Each element type: load and store as float, and the largest magnitude of a run as float. Magnitudes are compared as
// integers: there NaN > Inf > every finite number, so one maximum finds the scale and the poison alike.

struct Float32 {
  using Word = float;
  static float load(float v) { return v; }
  static float store(float v) { return v; }
  static float absmax(const float* x, int64_t n) {
    int32_t top = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t magnitude = static_cast<int32_t>(bits_of(x[i]) & 0x7fffffffu);
      top = magnitude > top ? magnitude : top;
    }
    return float_of(static_cast<uint32_t>(top));
  }
};

inline int16_t absmax16(const uint16_t* x, int64_t n) {
  int16_t top = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int16_t magnitude = static_cast<int16_t>(x[i] & 0x7fff);
    top = magnitude > top ? magnitude : top;
  }
  return top;
}

struct BFloat16 {
  using Word = uint16_t;
  static float load(uint16_t v) { return float_of(static_cast<uint32_t>(v) << 16); }
  static uint16_t store(float v) {  // nearest even; the NaN that we write keeps its quiet bit
    const uint32_t u = bits_of(v);
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  static float absmax(const uint16_t* x, int64_t n) { return load(static_cast<uint16_t>(absmax16(x, n))); }
};

// By hand and without branches, for compilers turn their own half type into one scalar conversion an element
// (measured: 20 times slower). After F. Giesen, "half to float done quick" and "float to half" (public domain).
struct Float16 {
  using Word = uint16_t;
  static float load(uint16_t v) {
    const uint32_t magnitude = static_cast<uint32_t>(v & 0x7fffu) << 13;
    const uint32_t exponent = magnitude & 0x0f800000u;
    const uint32_t widened = magnitude + (112u << 23);                           // bias 15 becomes bias 127
    const uint32_t infinite = widened + (112u << 23);                            // Inf, NaN: the top exponent
    const float tiny = float_of(widened + (1u << 23)) - float_of(113u << 23);    // denormal: no implicit 1
    const uint32_t out = exponent == 0x0f800000u ? infinite : exponent == 0 ? bits_of(tiny) : widened;
    return float_of(out | static_cast<uint32_t>(v & 0x8000u) << 16);
  }
  static uint16_t store(float v) {
    const uint32_t sign = bits_of(v) & 0x80000000u, u = bits_of(v) ^ sign;
    const uint32_t denormal = bits_of(float_of(u) + 0.5f) - 0x3f000000u;         // 0.5: the sum's ulp is 2^-24
    const uint32_t normal = (u - (112u << 23) + 0xfffu + ((u >> 13) & 1u)) >> 13;
    const uint32_t infinite = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t out = u >= 143u << 23 ? infinite : u < 113u << 23 ? denormal : normal;
    return static_cast<uint16_t>(out | sign >> 16);
  }
  static float absmax(const uint16_t* x, int64_t n) { return load(static_cast<uint16_t>(absmax16(x, n))); }
};

// ---- one block ----

inline int64_t block_codes_bytes(int64_t block, int bits) { return block * bits / 8; }

template <class T, bool Lifted>
inline uint32_t code_of(typename T::Word word, float inverse) {
  float v = T::load(word);
  if (Lifted) v *= kLift;
  return bits_of(v * inverse + kRound);
}

template <class T, int Bits, bool Lifted>
void pack_block(const typename T::Word* __restrict x, int64_t n, int64_t block, float inverse,
                uint8_t* __restrict codes) {
  if (Bits == 8) {
    for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(code_of<T, Lifted>(x[i], inverse));
    std::memset(codes + n, 0, static_cast<size_t>(block - n));
  } else {
    const int64_t half = block / 2;
    const int64_t low = n < half ? n : half, high = n - low;
    for (int64_t i = 0; i < high; ++i) {
      codes[i] = static_cast<uint8_t>((code_of<T, Lifted>(x[i], inverse) & 15u) |
                                      (code_of<T, Lifted>(x[half + i], inverse) << 4));
    }
    for (int64_t i = high; i < low; ++i) {
      codes[i] = static_cast<uint8_t>(code_of<T, Lifted>(x[i], inverse) & 15u);
    }
    std::memset(codes + low, 0, static_cast<size_t>(half - low));
  }
}

template <class T, int Bits>
void encode_block(const typename T::Word* x, int64_t n, int64_t block, uint8_t* codes, uint8_t* scale_at) {
  constexpr float qmax = Bits == 8 ? 127.0f : 7.0f;
  const float absmax = T::absmax(x, n);
  float scale = (absmax < kLargest ? absmax : kLargest) / qmax;
  if (bits_of(absmax) >= 0x7f800000u) {  // NaN or Inf: the whole block shall read as NaN
    scale = float_of(kQuietNaN);
    std::memset(codes, 0, static_cast<size_t>(block_codes_bytes(block, Bits)));
  } else {
    const bool lifted = absmax < kTiny;
    const float inverse = qmax / (lifted ? absmax * kLift : absmax);
    if (!(inverse <= FLT_MAX)) {  // all zeros
      std::memset(codes, 0, static_cast<size_t>(block_codes_bytes(block, Bits)));
    } else if (lifted) {
      pack_block<T, Bits, true>(x, n, block, inverse, codes);
    } else {
      pack_block<T, Bits, false>(x, n, block, inverse, codes);
    }
  }
  std::memcpy(scale_at, &scale, 4);  // follows the codes, so at any address
}

template <class T, bool Add>
inline void put(typename T::Word& out, float v) {
  out = T::store(Add ? T::load(out) + v : v);
}

template <class T, int Bits, bool Add>
void decode_block(const uint8_t* __restrict codes, const uint8_t* scale_at, int64_t n, int64_t block,
                  typename T::Word* __restrict out) {
  float scale;
  std::memcpy(&scale, scale_at, 4);
  if (scale != scale) scale = float_of(kQuietNaN);  // any other NaN could round to a number in bf16
  if (Bits == 8) {
    for (int64_t i = 0; i < n; ++i) {
      put<T, Add>(out[i], static_cast<float>(static_cast<int8_t>(codes[i])) * scale);
    }
  } else {
    const int64_t half = block / 2;
    const int64_t low = n < half ? n : half, high = n - low;
    for (int64_t i = 0; i < low; ++i) {
      put<T, Add>(out[i], static_cast<float>(static_cast<int8_t>(codes[i] << 4) >> 4) * scale);
    }
    for (int64_t i = 0; i < high; ++i) {
      put<T, Add>(out[half + i], static_cast<float>(static_cast<int8_t>(codes[i]) >> 4) * scale);
    }
  }
}

// ---- one segment ----

struct Segment {
  int64_t numel, block, blocks, codes_bytes;

  Segment(int64_t numel_, int64_t block_, int bits) : numel(numel_), block(block_) {
    if (block == 0) block = numel + (numel & 1);
    blocks = numel == 0 ? 0 : (numel + block - 1) / block;
    codes_bytes = block_codes_bytes(blocks * block, bits);
  }
  int64_t wire_bytes() const { return codes_bytes + 4 * blocks; }
  int64_t length(int64_t index) const {
    const int64_t rest = numel - index * block;
    return rest < block ? rest : block;
  }
};

template <class T, int Bits>
void encode_segment(const typename T::Word* x, const Segment& s, uint8_t* codes, uint8_t* scales) {
  for (int64_t b = 0; b < s.blocks; ++b) {
    encode_block<T, Bits>(x + b * s.block, s.length(b), s.block, codes + b * block_codes_bytes(s.block, Bits),
                          scales + 4 * b);
  }
}

template <class T, int Bits, bool Add>
void decode_segment(const uint8_t* codes, const uint8_t* scales, const Segment& s, typename T::Word* out) {
  for (int64_t b = 0; b < s.blocks; ++b) {
    decode_block<T, Bits, Add>(codes + b * block_codes_bytes(s.block, Bits), scales + 4 * b, s.length(b), s.block,
                               out + b * s.block);
  }
}

// ---- whole messages ----

struct Format {
  const int64_t* lengths;
  int64_t num_segments;
  int64_t block;
};

template <class T, int Bits>
void encode_rows(const void* x, int64_t x_stride_bytes, int64_t rows, const int64_t* order, const Format& f,
                 uint8_t* out, int64_t out_stride_bytes) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t from = order ? order[r] : r;
    const auto* row = reinterpret_cast<const typename T::Word*>(static_cast<const uint8_t*>(x) + from * x_stride_bytes);
    uint8_t* to = out + r * out_stride_bytes;
    for (int64_t k = 0; k < f.num_segments; ++k) {
      const Segment s(f.lengths[k], f.block, Bits);
      encode_segment<T, Bits>(row, s, to, to + s.codes_bytes);
      row += s.numel;
      to += s.wire_bytes();
    }
  }
}

template <class T, int Bits, bool Add>
void decode_rows(const uint8_t* messages, int64_t messages_stride_bytes, int64_t rows, const Format& f, void* out,
                 int64_t out_stride_bytes) {
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* from = messages + r * messages_stride_bytes;
    auto* row = reinterpret_cast<typename T::Word*>(static_cast<uint8_t*>(out) + r * out_stride_bytes);
    for (int64_t k = 0; k < f.num_segments; ++k) {
      const Segment s(f.lengths[k], f.block, Bits);
      decode_segment<T, Bits, Add>(from, from + s.codes_bytes, s, row);
      row += s.numel;
      from += s.wire_bytes();
    }
  }
}

template <class T>
void widen(const void* x, int64_t start, int64_t n, float* __restrict out) {
  const typename T::Word* word = static_cast<const typename T::Word*>(x) + start;
  for (int64_t i = 0; i < n; ++i) out[i] = T::load(word[i]);
}

struct Own {  // the part that never travelled, exact; none: x is null
  const void* x;
  int dtype;

  void copy(int64_t start, int64_t n, float* out) const {
    if (dtype == kFloat32 && static_cast<const float*>(x) + start == out) return;  // summed in place
    if (dtype == kFloat32) widen<Float32>(x, start, n, out);
    if (dtype == kBFloat16) widen<BFloat16>(x, start, n, out);
    if (dtype == kFloat16) widen<Float16>(x, start, n, out);
  }
};

struct Messages {
  const uint8_t* at;
  int64_t stride_bytes;
  int64_t count;
};

// Sum of blocks [first, first + num) of the segment that starts at `offset_bytes` in each message and at element
// `start` of the own part. Block by block over all messages, so that the sum stays in the nearest cache.
template <int Bits>
void reduce_blocks(const Messages& m, int64_t offset_bytes, const Own& own, int64_t start, const Segment& s,
                   int64_t first, int64_t num, float* out) {
  for (int64_t b = first; b < first + num; ++b) {
    const int64_t n = s.length(b);
    float* sum = out + (b - first) * s.block;
    if (own.x) {
      own.copy(start + b * s.block, n, sum);
    } else {
      std::memset(sum, 0, static_cast<size_t>(n) * 4);
    }
    for (int64_t k = 0; k < m.count; ++k) {
      const uint8_t* codes = m.at + k * m.stride_bytes + offset_bytes;
      decode_block<Float32, Bits, true>(codes + b * block_codes_bytes(s.block, Bits), codes + s.codes_bytes + 4 * b, n,
                                        s.block, sum);
    }
  }
}

template <int Bits>
void reduce(const Messages& m, const Own& own, const Format& f, float* out) {
  int64_t offset_bytes = 0, start = 0;
  for (int64_t k = 0; k < f.num_segments; ++k) {
    const Segment s(f.lengths[k], f.block, Bits);
    reduce_blocks<Bits>(m, offset_bytes, own, start, s, 0, s.blocks, out + start);
    offset_bytes += s.wire_bytes();
    start += s.numel;
  }
}

// Elements after which blocks of both sizes end together; the whole segment where they do not soon.
int64_t common_run(const Segment& in, const Segment& out) {
  const int64_t large = in.block > out.block ? in.block : out.block;
  const int64_t small = in.block > out.block ? out.block : in.block;
  if (small > 0 && large % small == 0) return large;
  const int64_t blocks = in.blocks * in.block, other = out.blocks * out.block;
  return blocks > other ? blocks : other;
}

template <int Bits, int OutBits>
int reduce_encode(const Messages& m, const Own& own, const Format& f, int64_t out_block, uint8_t* to) {
  int64_t largest = 0;
  for (int64_t k = 0; k < f.num_segments; ++k) {
    const int64_t run = common_run(Segment(f.lengths[k], f.block, Bits), Segment(f.lengths[k], out_block, OutBits));
    largest = run > largest ? run : largest;
  }
  float* sum = static_cast<float*>(std::malloc(static_cast<size_t>(largest) * 4 + 4));
  if (!sum) return 1;
  int64_t offset_bytes = 0, start = 0;
  for (int64_t k = 0; k < f.num_segments; ++k) {
    const Segment in(f.lengths[k], f.block, Bits), out(f.lengths[k], out_block, OutBits);
    const int64_t run = common_run(in, out);
    for (int64_t at = 0; at < in.numel; at += run) {
      const int64_t end = at + run < in.numel ? at + run : in.numel;
      const int64_t first = at / in.block, past = (end + in.block - 1) / in.block;
      reduce_blocks<Bits>(m, offset_bytes, own, start, in, first, past - first, sum);
      for (int64_t b = at / out.block; b * out.block < end; ++b) {
        encode_block<Float32, OutBits>(sum + (b * out.block - at), out.length(b), out.block,
                                       to + b * block_codes_bytes(out.block, OutBits), to + out.codes_bytes + 4 * b);
      }
    }
    offset_bytes += in.wire_bytes();
    start += in.numel;
    to += out.wire_bytes();
  }
  std::free(sum);
  return 0;
}

}  // namespace

// ---- what Python calls: 0 is success, 1 no memory, 2 a type or width that is not built in ----

#define FOR_DTYPE(DTYPE, CALL) \
  switch (DTYPE) {             \
    case kFloat32: {           \
      using T = Float32;       \
      CALL;                    \
      return 0;                \
    }                          \
    case kBFloat16: {          \
      using T = BFloat16;      \
      CALL;                    \
      return 0;                \
    }                          \
    case kFloat16: {           \
      using T = Float16;       \
      CALL;                    \
      return 0;                \
    }                          \
    default:                   \
      return 2;                \
  }

extern "C" {

int twinbed_quantize(const void* x, int dtype, int64_t numel, int bits, int64_t block, uint8_t* codes,
                     uint8_t* scales) {
  const Segment s(numel, block, bits);
  if (bits == 8) FOR_DTYPE(dtype, (encode_segment<T, 8>(static_cast<const T::Word*>(x), s, codes, scales)))
  if (bits == 4) FOR_DTYPE(dtype, (encode_segment<T, 4>(static_cast<const T::Word*>(x), s, codes, scales)))
  return 2;
}

int twinbed_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t numel, int bits, int64_t block, void* out,
                       int dtype) {
  const Segment s(numel, block, bits);
  if (bits == 8) FOR_DTYPE(dtype, (decode_segment<T, 8, false>(codes, scales, s, static_cast<T::Word*>(out))))
  if (bits == 4) FOR_DTYPE(dtype, (decode_segment<T, 4, false>(codes, scales, s, static_cast<T::Word*>(out))))
  return 2;
}

int twinbed_encode(const void* x, int64_t x_stride_bytes, int dtype, int64_t rows, const int64_t* order,
                   const int64_t* lengths, int64_t num_segments, int bits, int64_t block, uint8_t* out,
                   int64_t out_stride_bytes) {
  const Format f{lengths, num_segments, block};
  if (bits == 8) FOR_DTYPE(dtype, (encode_rows<T, 8>(x, x_stride_bytes, rows, order, f, out, out_stride_bytes)))
  if (bits == 4) FOR_DTYPE(dtype, (encode_rows<T, 4>(x, x_stride_bytes, rows, order, f, out, out_stride_bytes)))
  return 2;
}

int twinbed_decode(const uint8_t* messages, int64_t messages_stride_bytes, int64_t rows, const int64_t* lengths,
                   int64_t num_segments, int bits, int64_t block, void* out, int64_t out_stride_bytes, int dtype,
                   int accumulate) {
  const Format f{lengths, num_segments, block};
  if (accumulate) {  // sums are fp32
    if (dtype != kFloat32 || (bits != 8 && bits != 4)) return 2;
    if (bits == 8) decode_rows<Float32, 8, true>(messages, messages_stride_bytes, rows, f, out, out_stride_bytes);
    if (bits == 4) decode_rows<Float32, 4, true>(messages, messages_stride_bytes, rows, f, out, out_stride_bytes);
    return 0;
  }
  if (bits == 8) {
    FOR_DTYPE(dtype, (decode_rows<T, 8, false>(messages, messages_stride_bytes, rows, f, out, out_stride_bytes)))
  }
  if (bits == 4) {
    FOR_DTYPE(dtype, (decode_rows<T, 4, false>(messages, messages_stride_bytes, rows, f, out, out_stride_bytes)))
  }
  return 2;
}

int twinbed_reduce(const uint8_t* messages, int64_t messages_stride_bytes, int64_t count, const void* own,
                   int own_dtype, const int64_t* lengths, int64_t num_segments, int bits, int64_t block, float* out) {
  const Messages m{messages, messages_stride_bytes, count};
  const Own mine{own, own_dtype};
  const Format f{lengths, num_segments, block};
  if (bits == 8) reduce<8>(m, mine, f, out);
  if (bits == 4) reduce<4>(m, mine, f, out);
  return bits == 8 || bits == 4 ? 0 : 2;
}

int twinbed_reduce_encode(const uint8_t* messages, int64_t messages_stride_bytes, int64_t count, const void* own,
                          int own_dtype, const int64_t* lengths, int64_t num_segments, int bits, int64_t block,
                          int out_bits, int64_t out_block, uint8_t* out) {
  const Messages m{messages, messages_stride_bytes, count};
  const Own mine{own, own_dtype};
  const Format f{lengths, num_segments, block};
  if (bits == 8 && out_bits == 8) return reduce_encode<8, 8>(m, mine, f, out_block, out);
  if (bits == 8 && out_bits == 4) return reduce_encode<8, 4>(m, mine, f, out_block, out);
  if (bits == 4 && out_bits == 8) return reduce_encode<4, 8>(m, mine, f, out_block, out);
  if (bits == 4 && out_bits == 4) return reduce_encode<4, 4>(m, mine, f, out_block, out);
  return 2;
}

}  // extern "C"
