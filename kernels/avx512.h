// Blocks of elements on processors with 512-bit vectors. Compilers widen and narrow element by element in block.h's loops,
// and then tensors in a cache wait for arithmetic. Equal bits to those loops, which do all that these functions do not:
// blocks that are no multiple of kTile, or not whole, and blocks that are scaled up first.

#pragma once

#include "element.h"

#include <cfloat>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define TWINBED_AVX512
#include <immintrin.h>

namespace {
namespace avx512 {

constexpr int64_t kTile = 64;  // elements
constexpr int kSelect = 0xca;  // of a ternary operation: each bit of the first ? second : third

inline __m512i load(const void* at) { return _mm512_loadu_si512(at); }
inline __m256i load_half(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
inline void store_half(void* at, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(at), x); }

// The largest magnitude seen, compared as integers: see element.h.
template <class T>
class Largest {
 public:
  void see_tile(const typename T::Word* x) {
    for (int64_t i = 0; i < kTile; i += 2 * kLanes) {
      a_ = larger(a_, load(x + i));
      b_ = larger(b_, load(x + i + kLanes));
    }
  }
  void see(const typename T::Word* x, int64_t n) {
    int64_t i = 0;
    for (; i + kTile <= n; i += kTile) see_tile(x + i);
    for (; i < n; i += kLanes) {
      const int64_t rest = n - i < kLanes ? n - i : kLanes;
      typename T::Word last[kLanes] = {};
      std::memcpy(last, x + i, static_cast<size_t>(rest) * sizeof(typename T::Word));
      a_ = larger(a_, load(last));
    }
  }
  float value() const {
    if constexpr (kWide) {
      return float_of(static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(a_, b_))));
    } else {
      const __m512i c = _mm512_max_epi16(a_, b_);
      const __m256i d = _mm256_max_epi16(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
      const __m128i e = _mm_max_epi16(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
      const __m128i least = _mm_minpos_epu16(_mm_xor_si128(e, _mm_set1_epi16(0x7fff)));  // there is no maxpos
      return T::load(static_cast<uint16_t>(_mm_extract_epi16(least, 0) ^ 0x7fff));
    }
  }

 private:
  static constexpr bool kWide = sizeof(typename T::Word) == 4;
  static constexpr int64_t kLanes = kWide ? 16 : 32;

  static __m512i larger(__m512i top, __m512i x) {
    if constexpr (kWide) return _mm512_max_epi32(top, _mm512_and_si512(x, _mm512_set1_epi32(0x7fffffff)));
    return _mm512_max_epi16(top, _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)));
  }

  __m512i a_ = _mm512_setzero_si512(), b_ = a_;  // two, for one alone would wait for itself
};

// 32 elements as floats.
template <class T>
struct Floats {
  static constexpr bool kInTurn = false;  // element 0 in a, 1 in b, 2 in a, ...
  __m512 a, b;

  explicit Floats(const typename T::Word* x) : a(half(x)), b(half(x + 16)) {}

  static __m512 half(const float* x) { return _mm512_loadu_ps(x); }
  static __m512 half(const uint16_t* x) { return _mm512_cvtph_ps(load_half(x)); }
};

template <>
struct Floats<BFloat16> {  // two share a word: a shift and a mask part them
  static constexpr bool kInTurn = true;
  __m512 a, b;

  explicit Floats(const uint16_t* x)
      : a(_mm512_castsi512_ps(_mm512_slli_epi32(load(x), 16))),
        b(_mm512_castsi512_ps(_mm512_and_si512(load(x), _mm512_set1_epi32(-65536)))) {}
};

// Codes of 32 elements, in the low bits of each word.
template <class T>
struct Codes {
  __m512i a, b;

  Codes(const typename T::Word* x, __m512 inverse) {
    const Floats<T> v(x);
    const __m512 round = _mm512_set1_ps(kRound);
    a = _mm512_castps_si512(_mm512_add_ps(_mm512_mul_ps(v.a, inverse), round));
    b = _mm512_castps_si512(_mm512_add_ps(_mm512_mul_ps(v.b, inverse), round));
  }
};

#ifdef __AVX512VBMI__

template <class T>
struct LowBytes {
  alignas(64) uint8_t index[64] = {};

  constexpr LowBytes() {
    for (int i = 0; i < 32; ++i) {
      index[i] = static_cast<uint8_t>(Floats<T>::kInTurn ? i / 2 * 4 + i % 2 * 64 : i * 4);
    }
  }
};

#endif

// The lowest byte of each word of two vectors, in the order of the elements.
template <class T>
inline __m256i low_bytes(__m512i a, __m512i b) {
#ifdef __AVX512VBMI__
  static constexpr LowBytes<T> kTake;
  return _mm512_castsi512_si256(_mm512_permutex2var_epi8(a, load(kTake.index), b));
#else
  if constexpr (Floats<T>::kInTurn) {
    const __m512i pairs = _mm512_ternarylogic_epi32(_mm512_set1_epi32(255), a, _mm512_slli_epi32(b, 8), kSelect);
    return _mm512_cvtepi32_epi16(pairs);
  }
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(a)), _mm512_cvtepi32_epi8(b), 1);
#endif
}

// While a block is packed, one that comes later is looked at, and one behind that is asked for: a processor then waits
// neither for memory nor for a maximum and the divisions by it.
template <class T>
struct Ahead {
  const typename T::Word* block;  // null: there is none
  int64_t distance;               // from it to what is asked for
  Largest<T> largest = {};

  template <bool There>
  void look(int64_t i) {
    if (!There) return;
    largest.see_tile(block + i);
    for (int64_t k = 0; k < kTile; k += 64 / static_cast<int64_t>(sizeof(typename T::Word))) {
      _mm_prefetch(reinterpret_cast<const char*>(block + distance + i + k), _MM_HINT_T0);
    }
  }
};

template <class T, bool There>
inline void pack8(const typename T::Word* x, int64_t n, float inverse, uint8_t* codes, Ahead<T>& ahead) {
  const __m512 by = _mm512_set1_ps(inverse);
  for (int64_t i = 0; i < n; i += kTile) {
    ahead.template look<There>(i);
    const Codes<T> first(x + i, by), second(x + i + 32, by);
    store_half(codes + i, low_bytes<T>(first.a, first.b));
    store_half(codes + i + 32, low_bytes<T>(second.a, second.b));
  }
}

template <class T, bool There>
inline void pack4(const typename T::Word* x, int64_t n, float inverse, uint8_t* codes, Ahead<T>& ahead) {
  const __m512 by = _mm512_set1_ps(inverse);
  const __m512i nibble = _mm512_set1_epi32(15);
  for (int64_t i = 0; i < n / 2; i += 32) {
    ahead.template look<There>(2 * i);
    const Codes<T> low(x + i, by), high(x + n / 2 + i, by);
    const __m512i a = _mm512_ternarylogic_epi32(nibble, low.a, _mm512_slli_epi32(high.a, 4), kSelect);
    const __m512i b = _mm512_ternarylogic_epi32(nibble, low.b, _mm512_slli_epi32(high.b, 4), kSelect);
    store_half(codes + i, low_bytes<T>(a, b));
  }
}

// n: a multiple of kTile; so many elements are looked at where `ahead` has a block.
template <class T, int Bits>
inline void pack(const typename T::Word* x, int64_t n, float inverse, uint8_t* codes, Ahead<T>& ahead) {
  if (Bits == 8 && ahead.block) return pack8<T, true>(x, n, inverse, codes, ahead);
  if (Bits == 8) return pack8<T, false>(x, n, inverse, codes, ahead);
  if (ahead.block) return pack4<T, true>(x, n, inverse, codes, ahead);
  return pack4<T, false>(x, n, inverse, codes, ahead);
}

// Blocks that are packed one after another.
struct Group {
  static constexpr int64_t kBytes = 8192;  // of elements: fits in a first-level cache twice. A longer block is alone.
  static constexpr int64_t kBlocks = 16;   // at most: as many floats as a vector holds
  int64_t blocks;
  float largest[kBlocks] = {};

  explicit Group(int64_t block_bytes) : blocks(kBytes / block_bytes) {
    blocks = blocks < 1 ? 1 : blocks > kBlocks ? kBlocks : blocks;
  }
};

struct Scales {  // of a group: two divisions for all its blocks
  float scale[Group::kBlocks], inverse[Group::kBlocks];
  bool plain;  // else there is a block of zeros, or with NaN or Inf, or one that is scaled up, or near overflow

  Scales(const Group& group, float qmax) {
    const __m512 largest = _mm512_loadu_ps(group.largest), most = _mm512_set1_ps(qmax);
    const __mmask16 in = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(kTiny), _CMP_GE_OQ) &
                         _mm512_cmp_ps_mask(largest, _mm512_set1_ps(kLargest), _CMP_LT_OQ);
    const uint32_t blocks = (1u << group.blocks) - 1u;
    plain = (in & blocks) == blocks;
    _mm512_storeu_ps(scale, _mm512_div_ps(largest, most));
    _mm512_storeu_ps(inverse, _mm512_div_ps(most, largest));
  }
};

// n: a multiple of kTile. table: what each of the 16 codes stands for.
inline void unpack4(const uint8_t* codes, int64_t n, const uint16_t* table, uint16_t* out) {
  const __m512i values = _mm512_broadcast_i64x4(load_half(table));
  for (int64_t i = 0; i < n / 2; i += 32) {  // of an index the lowest five bits count, and the table is there twice
    const __m512i both = _mm512_cvtepu8_epi16(load_half(codes + i));
    _mm512_storeu_si512(out + i, _mm512_permutexvar_epi16(both, values));
    _mm512_storeu_si512(out + n / 2 + i, _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), values));
  }
}

// Adds what a block's 4-bit codes stand for, in each of several messages, to its sum: which stays in registers until all
// are added, in the messages' order. codes, tables: of the messages; n: a multiple of kTile.
inline void add4(const uint8_t* const* codes, const float (*tables)[16], int64_t messages, int64_t n, float* sum) {
  for (int64_t i = 0; i < n / 2; i += 32) {
    float *low = sum + i, *high = sum + n / 2 + i;
    __m512 a = _mm512_loadu_ps(low), b = _mm512_loadu_ps(low + 16);
    __m512 c = _mm512_loadu_ps(high), d = _mm512_loadu_ps(high + 16);
    for (int64_t k = 0; k < messages; ++k) {
      const __m512 table = _mm512_loadu_ps(tables[k]);  // of an index the lowest four bits count
      const __m512i first = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes[k] + i)));
      const __m512i second = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes[k] + i + 16)));
      a = _mm512_add_ps(a, _mm512_permutexvar_ps(first, table));
      b = _mm512_add_ps(b, _mm512_permutexvar_ps(second, table));
      c = _mm512_add_ps(c, _mm512_permutexvar_ps(_mm512_srli_epi32(first, 4), table));
      d = _mm512_add_ps(d, _mm512_permutexvar_ps(_mm512_srli_epi32(second, 4), table));
    }
    _mm512_storeu_ps(low, a);
    _mm512_storeu_ps(low + 16, b);
    _mm512_storeu_ps(high, c);
    _mm512_storeu_ps(high + 16, d);
  }
}

inline __m512 scaled16(const uint8_t* codes, float scale) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), _mm512_set1_ps(scale));
}

inline void unpack8(Float16, const uint8_t* codes, int64_t n, float scale, uint16_t* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const __m256i halves = _mm512_cvtps_ph(scaled16(codes + i, scale), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    store_half(out + i, halves);
  }
}

#ifdef __AVX512BF16__
// The instruction takes denormals for zeros, so `scale` is none.
inline void unpack8(BFloat16, const uint8_t* codes, int64_t n, float scale, uint16_t* out) {
  for (int64_t i = 0; i < n; i += 32) {
    const __m512bh both = _mm512_cvtne2ps_pbh(scaled16(codes + i + 16, scale), scaled16(codes + i, scale));
    std::memcpy(out + i, &both, sizeof both);
  }
}
#define TWINBED_AVX512_BF16 true
#else
inline void unpack8(BFloat16, const uint8_t*, int64_t, float, uint16_t*) {}
#define TWINBED_AVX512_BF16 false
#endif

// Whether it did: fp32 is as fast in block.h's loop.
template <class T, int Bits>
inline bool unpack(const uint8_t* codes, int64_t n, float scale, typename T::Word* out) {
  constexpr bool kBrain = std::is_same<T, BFloat16>::value;
  if constexpr (sizeof(typename T::Word) == 2) {
    if (Bits == 4) {
      uint16_t table[16];
      for (int k = 0; k < 16; ++k) table[k] = T::store(static_cast<float>(k < 8 ? k : k - 16) * scale);
      unpack4(codes, n, table, out);
      return true;
    }
    if (!kBrain || (TWINBED_AVX512_BF16 && !(scale < FLT_MIN))) {
      unpack8(T{}, codes, n, scale, out);
      return true;
    }
  }
  return false;
}

}  // namespace avx512
}  // namespace

#endif
