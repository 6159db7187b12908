// Block codec on a CPU: messages, their sums and what Python calls. One segment: segment.h.
//
// No state and no libraries: any number of threads may call in, with the interpreter's lock released. A call may use
// the threads of torch's pool; blocks do not depend on each other, so the result is the same with any number.

#include "block.h"
#include "pool.h"
#include "segment.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

// ---- whole messages ----

struct Format {
  const int64_t* lengths;
  int64_t num_segments;
  int64_t block;
};

template <class T, int Bits>
int encode_part(const void* x, const Segment& s, uint8_t* codes, uint8_t* scales, Part part) {
  encode_segment<T, Bits>(static_cast<const typename T::Word*>(x), s, part.first_of(s.blocks), part.past_of(s.blocks),
                          codes, scales);
  return 0;
}

template <class T, int Bits>
int decode_part(const uint8_t* codes, const uint8_t* scales, const Segment& s, void* out, Part part) {
  decode_segment<T, Bits, false>(codes, scales, s, part.first_of(s.blocks), part.past_of(s.blocks),
                                 static_cast<typename T::Word*>(out));
  return 0;
}

template <int Bits>
int64_t blocks_of(const Format& f) {
  int64_t blocks = 0;
  for (int64_t k = 0; k < f.num_segments; ++k) blocks += Segment(f.lengths[k], f.block, Bits).blocks;
  return blocks;
}

// visit(row, segment, from, past, start, offset_bytes) for each run of a segment's blocks in the part: `start` is the
// segment's first element in a row, `offset_bytes` its place in a message.
template <int Bits, class Visit>
void each_run(int64_t rows, const Format& f, Part part, const Visit& visit) {
  const int64_t total = rows * blocks_of<Bits>(f);
  const int64_t first = part.first_of(total), past = part.past_of(total);
  int64_t seen = 0;
  for (int64_t r = 0; r < rows && seen < past; ++r) {
    int64_t start = 0, offset_bytes = 0;
    for (int64_t k = 0; k < f.num_segments; ++k) {
      const Segment s(f.lengths[k], f.block, Bits);
      const int64_t from = first > seen ? first - seen : 0;
      const int64_t end = past - seen < s.blocks ? past - seen : s.blocks;
      if (from < end) visit(r, s, from, end, start, offset_bytes);
      seen += s.blocks;
      start += s.numel;
      offset_bytes += s.wire_bytes();
    }
  }
}

template <class T, int Bits>
int encode_rows(const void* x, int64_t x_stride_bytes, int64_t rows, const int64_t* order, const Format& f,
                uint8_t* out, int64_t out_stride_bytes, Part part) {
  each_run<Bits>(rows, f, part, [&](int64_t r, const Segment& s, int64_t from, int64_t past, int64_t start,
                                    int64_t offset_bytes) {
    const auto* row = reinterpret_cast<const typename T::Word*>(static_cast<const uint8_t*>(x) +
                                                                (order ? order[r] : r) * x_stride_bytes);
    uint8_t* to = out + r * out_stride_bytes + offset_bytes;
    encode_segment<T, Bits>(row + start, s, from, past, to, to + s.codes_bytes);
  });
  return 0;
}

template <class T, int Bits, bool Add>
int decode_rows(const uint8_t* messages, int64_t messages_stride_bytes, int64_t rows, const Format& f, void* out,
                int64_t out_stride_bytes, Part part) {
  each_run<Bits>(rows, f, part, [&](int64_t r, const Segment& s, int64_t from, int64_t past, int64_t start,
                                    int64_t offset_bytes) {
    const uint8_t* codes = messages + r * messages_stride_bytes + offset_bytes;
    auto* row = reinterpret_cast<typename T::Word*>(static_cast<uint8_t*>(out) + r * out_stride_bytes);
    decode_segment<T, Bits, Add>(codes, codes + s.codes_bytes, s, from, past, row + start);
  });
  return 0;
}

template <class T>
void widen(const void* x, int64_t start, int64_t n, float* __restrict out) {
  const typename T::Word* word = static_cast<const typename T::Word*>(x) + start;
  for (int64_t i = 0; i < n; ++i) out[i] = T::load(word[i]);
}

struct Own {  // the part that never travelled, exact; none: x is null
  const void* x;
  int dtype;

  ONCE void copy(int64_t start, int64_t n, float* out) const {
    if (dtype == kFloat32 && static_cast<const float*>(x) + start == out) return;  // summed in place
    if (dtype == kFloat32) widen<Float32>(x, start, n, out);
    if (dtype == kBFloat16) widen<BFloat16>(x, start, n, out);
    if (dtype == kFloat16) widen<Float16>(x, start, n, out);
  }
};

// ---- error feedback: what a code lost is added, as a moving average, to what is quantized next ----

template <class E>
void add_error(const typename E::Word* __restrict error, int64_t n, float* __restrict sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] = sum[i] + E::load(error[i]);
}

struct Feedback {  // none: at is null
  void* at;
  int dtype;
  float keep, take;  // error = keep * error + take * (sum - decoded)

  // sum += error, for the n elements from `start`
  ONCE void add(int64_t start, int64_t n, float* sum) const {
    if (dtype == kFloat32) add_error<Float32>(static_cast<const float*>(at) + start, n, sum);
    if (dtype == kBFloat16) add_error<BFloat16>(static_cast<const uint16_t*>(at) + start, n, sum);
    if (dtype == kFloat16) add_error<Float16>(static_cast<const uint16_t*>(at) + start, n, sum);
  }

  // What does not fit in an fp16 error becomes its largest number: Inf would never go away.
  template <class E>
  void move(typename E::Word* __restrict error, const float* __restrict sum, const float* __restrict decoded,
            int64_t n) const {
    for (int64_t i = 0; i < n; ++i) {
      const float moved = keep * E::load(error[i]) + take * (sum[i] - decoded[i]);
      error[i] = E::store(moved > E::kBound ? E::kBound : moved < -E::kBound ? -E::kBound : moved);
    }
  }

  // The new error of one block. A block that holds NaN or Inf starts anew, or it would never recover.
  template <int Bits>
  ONCE void update(int64_t start, int64_t n, int64_t block, const float* sum, const uint8_t* codes,
                   const uint8_t* scale_at, float* decoded) const {
    const int64_t word_bytes = dtype == kFloat32 ? 4 : 2;
    uint8_t* error = static_cast<uint8_t*>(at) + start * word_bytes;
    float scale;
    std::memcpy(&scale, scale_at, 4);
    if (scale != scale) {
      std::memset(error, 0, static_cast<size_t>(n * word_bytes));
      return;
    }
    decode_block<Float32, Bits, false>(codes, scale_at, n, block, decoded);
    if (dtype == kFloat32) move<Float32>(reinterpret_cast<float*>(error), sum, decoded, n);
    if (dtype == kBFloat16) move<BFloat16>(reinterpret_cast<uint16_t*>(error), sum, decoded, n);
    if (dtype == kFloat16) move<Float16>(reinterpret_cast<uint16_t*>(error), sum, decoded, n);
  }
};

template <int Bits>
int64_t longest_block(const Format& f) {
  int64_t longest = 0;
  for (int64_t k = 0; k < f.num_segments; ++k) {
    const Segment s(f.lengths[k], f.block, Bits);
    longest = s.block > longest ? s.block : longest;
  }
  return longest;
}

struct Scratch {
  float* at;

  explicit Scratch(int64_t floats) : at(static_cast<float*>(std::malloc(static_cast<size_t>(floats) * 4 + 4))) {}
  ~Scratch() { std::free(at); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

template <int Bits>
int encode_rows_corrected(const void* x, int64_t x_stride_bytes, int dtype, int64_t rows, const int64_t* order,
                          const Format& f, const Feedback& error, int64_t error_stride, uint8_t* out,
                          int64_t out_stride_bytes, Part part) {
  const int64_t longest = longest_block<Bits>(f);
  const Scratch sum(longest), decoded(longest);
  if (!sum.at || !decoded.at) return 1;
  each_run<Bits>(rows, f, part, [&](int64_t r, const Segment& s, int64_t from, int64_t past, int64_t start,
                                    int64_t offset_bytes) {
    const Own row{static_cast<const uint8_t*>(x) + (order ? order[r] : r) * x_stride_bytes, dtype};
    uint8_t* to = out + r * out_stride_bytes + offset_bytes;
    for (int64_t b = from; b < past; ++b) {
      const int64_t n = s.length(b), at = start + b * s.block;
      uint8_t* codes = to + b * block_codes_bytes(s.block, Bits);
      uint8_t* scale = to + s.codes_bytes + 4 * b;
      row.copy(at, n, sum.at);
      error.add(r * error_stride + at, n, sum.at);
      encode_block<Float32, Bits>(sum.at, n, s.block, codes, scale);
      error.update<Bits>(r * error_stride + at, n, s.block, sum.at, codes, scale, decoded.at);
    }
  });
  return 0;
}

// ---- sums of messages ----

struct Messages {
  const uint8_t* at;
  int64_t stride_bytes;
  int64_t count;
};

// Adds the b-th block of a segment, which starts at `offset_bytes` in each message, to `sum`: message by message.
template <int Bits>
inline void add_block(const Messages& m, int64_t offset_bytes, const Segment& s, int64_t b, float* sum) {
  const int64_t n = s.length(b), code_at = offset_bytes + b * block_codes_bytes(s.block, Bits);
  const int64_t scale_at = offset_bytes + s.codes_bytes + 4 * b;
  int64_t done = 0;
#ifdef TWINBED_AVX512
  constexpr int64_t kAtOnce = 16;
  for (; Bits == 4 && n == s.block && n % avx512::kTile == 0 && done < m.count; done += kAtOnce) {
    const uint8_t* codes[kAtOnce];
    float tables[kAtOnce][16];
    const int64_t count = m.count - done < kAtOnce ? m.count - done : kAtOnce;
    for (int64_t k = 0; k < count; ++k) {
      const uint8_t* message = m.at + (done + k) * m.stride_bytes;
      const float scale = scale_in(message + scale_at);
      codes[k] = message + code_at;
      for (int c = 0; c < 16; ++c) tables[k][c] = static_cast<float>(c < 8 ? c : c - 16) * scale;
    }
    avx512::add4(codes, tables, count, n, sum);
  }
#endif
  for (; done < m.count; ++done) {
    const uint8_t* message = m.at + done * m.stride_bytes;
    decode_block<Float32, Bits, true>(message + code_at, message + scale_at, n, s.block, sum);
  }
}

// Sum of blocks [first, first + num) of the segment that starts at `offset_bytes` in each message and at element
// `start` of the own part. Block by block over all messages, so that the sum stays in the nearest cache.
template <int Bits>
ONCE void reduce_blocks(const Messages& m, int64_t offset_bytes, const Own& own, int64_t start, const Segment& s,
                        int64_t first, int64_t num, float* out) {
  for (int64_t b = first; b < first + num; ++b) {
    const int64_t n = s.length(b);
    float* sum = out + (b - first) * s.block;
    if (own.x) {
      own.copy(start + b * s.block, n, sum);
    } else {
      std::memset(sum, 0, static_cast<size_t>(n) * 4);
    }
    add_block<Bits>(m, offset_bytes, s, b, sum);
  }
}

template <int Bits>
int reduce(const Messages& m, const Own& own, const Format& f, float* out, Part part) {
  each_run<Bits>(1, f, part, [&](int64_t, const Segment& s, int64_t from, int64_t past, int64_t start,
                                 int64_t offset_bytes) {
    reduce_blocks<Bits>(m, offset_bytes, own, start, s, from, past - from, out + start + from * s.block);
  });
  return 0;
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
int reduce_encode(const Messages& m, const Own& own, const Format& f, int64_t out_block, const Feedback& error,
                  uint8_t* to, Part part) {
  int64_t largest = 0, total = 0;
  for (int64_t k = 0; k < f.num_segments; ++k) {
    const int64_t run = common_run(Segment(f.lengths[k], f.block, Bits), Segment(f.lengths[k], out_block, OutBits));
    largest = run > largest ? run : largest;
    total += run > 0 ? (f.lengths[k] + run - 1) / run : 0;
  }
  const Scratch sum(largest), decoded(error.at ? largest : 0);
  if (!sum.at || !decoded.at) return 1;
  const int64_t mine = part.first_of(total), past_mine = part.past_of(total);
  int64_t offset_bytes = 0, start = 0, seen = 0;
  for (int64_t k = 0; k < f.num_segments; ++k) {
    const Segment in(f.lengths[k], f.block, Bits), out(f.lengths[k], out_block, OutBits);
    const int64_t run = common_run(in, out);
    for (int64_t at = 0; at < in.numel; at += run, ++seen) {
      if (seen < mine || seen >= past_mine) continue;
      const int64_t end = at + run < in.numel ? at + run : in.numel;
      const int64_t first = at / in.block, past = (end + in.block - 1) / in.block;
      reduce_blocks<Bits>(m, offset_bytes, own, start, in, first, past - first, sum.at);
      if (error.at) error.add(start + at, end - at, sum.at);
      for (int64_t b = at / out.block; b * out.block < end; ++b) {
        uint8_t* codes = to + b * block_codes_bytes(out.block, OutBits);
        uint8_t* scale = to + out.codes_bytes + 4 * b;
        const float* block_sum = sum.at + (b * out.block - at);
        encode_block<Float32, OutBits>(block_sum, out.length(b), out.block, codes, scale);
        if (error.at) {
          error.update<OutBits>(start + b * out.block, out.length(b), out.block, block_sum, codes, scale, decoded.at);
        }
      }
    }
    offset_bytes += in.wire_bytes();
    start += in.numel;
    to += out.wire_bytes();
  }
  return 0;
}

// ---- Inf and NaN ----

template <class T>
int64_t first_bad(const void* x, int64_t numel, int64_t block) {
  const Segment s(numel, block, 8);
  for (int64_t b = 0; b < s.blocks; ++b) {
    const float absmax = absmax_of<T>(static_cast<const typename T::Word*>(x) + b * s.block, s.length(b));
    if (bits_of(absmax) >= 0x7f800000u) return b;
  }
  return -1;
}

// found: row, segment, block; left alone where all scales are finite
template <int Bits>
bool first_bad_scale(const Messages& m, const Format& f, int64_t* found) {
  for (int64_t r = 0; r < m.count; ++r) {
    const uint8_t* at = m.at + r * m.stride_bytes;
    for (int64_t k = 0; k < f.num_segments; ++k) {
      const Segment s(f.lengths[k], f.block, Bits);
      for (int64_t b = 0; b < s.blocks; ++b) {
        uint32_t scale;
        std::memcpy(&scale, at + s.codes_bytes + 4 * b, 4);
        if ((scale & 0x7f800000u) == 0x7f800000u) {
          found[0] = r;
          found[1] = k;
          found[2] = b;
          return true;
        }
      }
      at += s.wire_bytes();
    }
  }
  return false;
}

}  // namespace

// ---- what Python calls: 0 is success, 1 no memory, 2 a type or width that is not built in ----

#define FOR_DTYPE(DTYPE, CALL) \
  switch (DTYPE) {             \
    case kFloat32: {           \
      using T = Float32;       \
      return CALL;             \
    }                          \
    case kBFloat16: {          \
      using T = BFloat16;      \
      return CALL;             \
    }                          \
    case kFloat16: {           \
      using T = Float16;       \
      return CALL;             \
    }                          \
    default:                   \
      return 2;                \
  }

// A share of the blocks on each of `threads` threads.
#define IN_PARTS(...) run_parts(threads, [&](Part part) { return __VA_ARGS__; })

extern "C" {

int twinbed_quantize(const void* x, int dtype, int64_t numel, int bits, int64_t block, uint8_t* codes, uint8_t* scales,
                     int threads) {
  const Segment s(numel, block, bits);
  if (bits == 8) FOR_DTYPE(dtype, (IN_PARTS(encode_part<T, 8>(x, s, codes, scales, part))))
  if (bits == 4) FOR_DTYPE(dtype, (IN_PARTS(encode_part<T, 4>(x, s, codes, scales, part))))
  return 2;
}

int twinbed_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t numel, int bits, int64_t block, void* out,
                       int dtype, int threads) {
  const Segment s(numel, block, bits);
  if (bits == 8) FOR_DTYPE(dtype, (IN_PARTS(decode_part<T, 8>(codes, scales, s, out, part))))
  if (bits == 4) FOR_DTYPE(dtype, (IN_PARTS(decode_part<T, 4>(codes, scales, s, out, part))))
  return 2;
}

int twinbed_encode(const void* x, int64_t x_stride_bytes, int dtype, int64_t rows, const int64_t* order,
                   const int64_t* lengths, int64_t num_segments, int bits, int64_t block, uint8_t* out,
                   int64_t out_stride_bytes, int threads) {
  const Format f{lengths, num_segments, block};
  const int64_t stride = x_stride_bytes, to = out_stride_bytes;
  if (bits == 8) FOR_DTYPE(dtype, (IN_PARTS(encode_rows<T, 8>(x, stride, rows, order, f, out, to, part))))
  if (bits == 4) FOR_DTYPE(dtype, (IN_PARTS(encode_rows<T, 4>(x, stride, rows, order, f, out, to, part))))
  return 2;
}

int twinbed_encode_corrected(const void* x, int64_t x_stride_bytes, int dtype, int64_t rows, const int64_t* order,
                             const int64_t* lengths, int64_t num_segments, int bits, int64_t block, uint8_t* out,
                             int64_t out_stride_bytes, void* error, int64_t error_stride, int error_dtype, float keep,
                             float take, int threads) {
  const Format f{lengths, num_segments, block};
  const Feedback feedback{error, error_dtype, keep, take};
  if (bits == 8) {
    return IN_PARTS(encode_rows_corrected<8>(x, x_stride_bytes, dtype, rows, order, f, feedback, error_stride, out,
                                             out_stride_bytes, part));
  }
  if (bits == 4) {
    return IN_PARTS(encode_rows_corrected<4>(x, x_stride_bytes, dtype, rows, order, f, feedback, error_stride, out,
                                             out_stride_bytes, part));
  }
  return 2;
}

int twinbed_decode(const uint8_t* messages, int64_t messages_stride_bytes, int64_t rows, const int64_t* lengths,
                   int64_t num_segments, int bits, int64_t block, void* out, int64_t out_stride_bytes, int dtype,
                   int accumulate, int threads) {
  const Format f{lengths, num_segments, block};
  const int64_t stride = messages_stride_bytes, to = out_stride_bytes;
  if (accumulate) {  // sums are fp32
    if (dtype != kFloat32) return 2;
    if (bits == 8) return IN_PARTS(decode_rows<Float32, 8, true>(messages, stride, rows, f, out, to, part));
    if (bits == 4) return IN_PARTS(decode_rows<Float32, 4, true>(messages, stride, rows, f, out, to, part));
    return 2;
  }
  if (bits == 8) FOR_DTYPE(dtype, (IN_PARTS(decode_rows<T, 8, false>(messages, stride, rows, f, out, to, part))))
  if (bits == 4) FOR_DTYPE(dtype, (IN_PARTS(decode_rows<T, 4, false>(messages, stride, rows, f, out, to, part))))
  return 2;
}

int twinbed_reduce(const uint8_t* messages, int64_t messages_stride_bytes, int64_t count, const void* own,
                   int own_dtype, const int64_t* lengths, int64_t num_segments, int bits, int64_t block, float* out,
                   int threads) {
  const Messages m{messages, messages_stride_bytes, count};
  const Own mine{own, own_dtype};
  const Format f{lengths, num_segments, block};
  if (bits == 8) return IN_PARTS(reduce<8>(m, mine, f, out, part));
  if (bits == 4) return IN_PARTS(reduce<4>(m, mine, f, out, part));
  return 2;
}

int twinbed_reduce_encode(const uint8_t* messages, int64_t messages_stride_bytes, int64_t count, const void* own,
                          int own_dtype, const int64_t* lengths, int64_t num_segments, int bits, int64_t block,
                          int out_bits, int64_t out_block, uint8_t* out, void* error, int error_dtype, float keep,
                          float take, int threads) {
  const Messages m{messages, messages_stride_bytes, count};
  const Own mine{own, own_dtype};
  const Format f{lengths, num_segments, block};
  const Feedback feedback{error, error_dtype, keep, take};
  if (bits == 8 && out_bits == 8) return IN_PARTS(reduce_encode<8, 8>(m, mine, f, out_block, feedback, out, part));
  if (bits == 8 && out_bits == 4) return IN_PARTS(reduce_encode<8, 4>(m, mine, f, out_block, feedback, out, part));
  if (bits == 4 && out_bits == 8) return IN_PARTS(reduce_encode<4, 8>(m, mine, f, out_block, feedback, out, part));
  if (bits == 4 && out_bits == 4) return IN_PARTS(reduce_encode<4, 4>(m, mine, f, out_block, feedback, out, part));
  return 2;
}

// The first block with NaN or Inf, or -1.
int twinbed_first_bad(const void* x, int dtype, int64_t numel, int64_t block, int64_t* found) {
  FOR_DTYPE(dtype, (*found = first_bad<T>(x, numel, block), 0))
}

// Row, segment and block of the first one that was quantized from NaN or Inf, or -1 as its row.
int twinbed_first_bad_scale(const uint8_t* messages, int64_t messages_stride_bytes, int64_t rows,
                            const int64_t* lengths, int64_t num_segments, int bits, int64_t block, int64_t* found) {
  const Messages m{messages, messages_stride_bytes, rows};
  const Format f{lengths, num_segments, block};
  found[0] = -1;
  if (bits == 8) first_bad_scale<8>(m, f, found);
  if (bits == 4) first_bad_scale<4>(m, f, found);
  return bits == 8 || bits == 4 ? 0 : 2;
}

}  // extern "C"
