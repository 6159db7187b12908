// One block of elements and its codes: the arithmetic of the codec on a CPU. Formats: layout.py. Twin in plain torch:
// reference.py.
//
// Both give equal bits, so every float operation here is one IEEE operation of the twin: build with
// -ffp-contract=off and never with -ffast-math, which would also let NaN through the poison check.

#pragma once

#include "avx512.h"
#include "element.h"

#include <cfloat>
#include <cstdint>
#include <cstring>

namespace {

// Once in the library for each type and width, however many loops call them: compiled into each, they took five times
// as long to compile, and a call costs nothing beside a block.
#define ONCE __attribute__((noinline))

template <int Bits>
constexpr float kQmax = Bits == 8 ? 127.0f : 7.0f;

inline int64_t block_codes_bytes(int64_t block, int bits) { return block * bits / 8; }

template <class T>
inline float absmax_of(const typename T::Word* x, int64_t n) {
#ifdef TWINBED_AVX512
  avx512::Largest<T> largest;
  largest.see(x, n);
  return largest.value();
#else
  return T::absmax(x, n);
#endif
}

template <class T, bool Lifted>
inline uint32_t code_of(typename T::Word word, float inverse) {
  float v = T::load(word);
  if (Lifted) v *= kLift;
  return bits_of(v * inverse + kRound);
}

template <class T, int Bits, bool Lifted>
void pack_block(const typename T::Word* __restrict x, int64_t n, int64_t block, float inverse,
                uint8_t* __restrict codes) {
#ifdef TWINBED_AVX512
  if (!Lifted && n == block && n % avx512::kTile == 0) {
    avx512::Ahead<T> none{nullptr, 0};
    return avx512::pack<T, Bits>(x, n, inverse, codes, none);
  }
#endif
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

// What a block's elements are multiplied with, and how they are packed.
struct Scale {
  float scale;    // as it travels
  float inverse;  // after the lift, where there is one
  enum Kind : int { kPlain, kLifted, kNoCodes } kind;
};

template <class T, int Bits>
ONCE Scale scale_of(const typename T::Word* x, int64_t n) {
  const float absmax = absmax_of<T>(x, n);
  if (bits_of(absmax) >= 0x7f800000u) {  // NaN or Inf: the whole block shall read as NaN
    return {float_of(kQuietNaN), 0.0f, Scale::kNoCodes};
  }
  const bool lifted = absmax < kTiny;
  const float inverse = kQmax<Bits> / (lifted ? absmax * kLift : absmax);
  const float scale = (absmax < kLargest ? absmax : kLargest) / kQmax<Bits>;
  return {scale, inverse, !(inverse <= FLT_MAX) ? Scale::kNoCodes : lifted ? Scale::kLifted : Scale::kPlain};
}

template <class T, int Bits>
ONCE void encode_scaled(const typename T::Word* x, int64_t n, int64_t block, Scale with, uint8_t* codes,
                        uint8_t* scale_at) {
  if (with.kind == Scale::kPlain) {
    pack_block<T, Bits, false>(x, n, block, with.inverse, codes);
  } else if (with.kind == Scale::kLifted) {
    pack_block<T, Bits, true>(x, n, block, with.inverse, codes);
  } else {  // poisoned, or all zeros
    std::memset(codes, 0, static_cast<size_t>(block_codes_bytes(block, Bits)));
  }
  std::memcpy(scale_at, &with.scale, 4);  // follows the codes, so at any address
}

template <class T, int Bits>
inline void encode_block(const typename T::Word* x, int64_t n, int64_t block, uint8_t* codes, uint8_t* scale_at) {
  encode_scaled<T, Bits>(x, n, block, scale_of<T, Bits>(x, n), codes, scale_at);
}

template <class T, bool Add>
inline void put(typename T::Word& out, float v) {
  out = T::store(Add ? T::load(out) + v : v);
}

inline float scale_in(const uint8_t* at) {
  float scale;
  std::memcpy(&scale, at, 4);
  return scale == scale ? scale : float_of(kQuietNaN);  // any other NaN could round to a number in bf16
}

template <class T, int Bits, bool Add>
ONCE void decode_block(const uint8_t* __restrict codes, const uint8_t* scale_at, int64_t n, int64_t block,
                       typename T::Word* __restrict out) {
  const float scale = scale_in(scale_at);
#ifdef TWINBED_AVX512
  if (!Add && n == block && n % avx512::kTile == 0 && avx512::unpack<T, Bits>(codes, n, scale, out)) return;
#endif
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
