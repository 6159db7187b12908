// One block of elements and its codes: the arithmetic of the codec on a CPU. Formats: layout.py. Twin in plain torch:
// reference.py.
//
// Both give equal bits, so every float operation here is one IEEE operation of the twin: build with
// -ffp-contract=off and never with -ffast-math, which would also let NaN through the poison check.

#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>
#include <limits>

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
  static constexpr float kBound = std::numeric_limits<float>::infinity();  // nothing above it is stored as an error
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
  static constexpr float kBound = std::numeric_limits<float>::infinity();
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
  static constexpr float kBound = 65504.0f;
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

// Once in the library for each type and width, however many loops call them: compiled into each, they took five times
// as long to compile, and a call costs nothing beside a block.
#define ONCE __attribute__((noinline))

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
ONCE void encode_block(const typename T::Word* x, int64_t n, int64_t block, uint8_t* codes, uint8_t* scale_at) {
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
ONCE void decode_block(const uint8_t* __restrict codes, const uint8_t* scale_at, int64_t n, int64_t block,
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

}  // namespace
