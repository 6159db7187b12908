// The types of elements: how one is read and written as fp32, and the largest magnitude of many.

#pragma once

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

}  // namespace
