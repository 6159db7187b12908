// One segment of a message: blocks one after another, their codes first and then their scales. One block: block.h.

#pragma once

#include "block.h"

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kNear = 16384;  // bytes; two such blocks fit in any first-level cache. A guess.

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

#ifdef TWINBED_AVX512

// Packs a group of blocks and finds the largest magnitudes of the next, which lies right behind it where there is one.
template <class T, int Bits>
inline void encode_group(const typename T::Word* x, int64_t block, bool more, avx512::Group& group, uint8_t* codes,
                         uint8_t* scales) {
  const avx512::Scales with(group, kQmax<Bits>);
  const int64_t distance = group.blocks * block;
  for (int64_t k = 0; k < group.blocks; ++k, x += block, codes += block_codes_bytes(block, Bits)) {
    avx512::Ahead<T> ahead{more ? x + distance : nullptr, distance};
    if (with.plain) {
      avx512::pack<T, Bits>(x, block, with.inverse[k], codes, ahead);
    } else {
      if (more) ahead.largest.see(ahead.block, block);
      encode_block<T, Bits>(x, block, block, codes, scales + 4 * k);
    }
    group.largest[k] = ahead.largest.value();
  }
  if (with.plain) std::memcpy(scales, with.scale, static_cast<size_t>(4 * group.blocks));
}

// Of the blocks [from, past) as many as fill groups; the first that is left.
template <class T, int Bits>
ONCE int64_t encode_groups(const typename T::Word* x, const Segment& s, int64_t from, int64_t past, uint8_t* codes,
                           uint8_t* scales) {
  if (s.block == 0 || s.block % avx512::kTile != 0) return from;
  const int64_t whole = s.numel / s.block < past ? s.numel / s.block : past;
  avx512::Group group(s.block * static_cast<int64_t>(sizeof(typename T::Word)));
  const int64_t end = from + (whole - from) / group.blocks * group.blocks;
  if (from >= end) return from;
  for (int64_t k = 0; k < group.blocks; ++k) group.largest[k] = absmax_of<T>(x + (from + k) * s.block, s.block);
  for (int64_t b = from; b < end; b += group.blocks) {
    encode_group<T, Bits>(x + b * s.block, s.block, b + group.blocks < end, group,
                          codes + b * block_codes_bytes(s.block, Bits), scales + 4 * b);
  }
  return end;
}

#endif

// Blocks [from, past) of it; the pointers are to its first one. A short block's scale is found while the block before it
// is packed: found at its turn, nothing could be packed before the maximum and two divisions are there. It also brings the
// elements near.
template <class T, int Bits>
void encode_segment(const typename T::Word* x, const Segment& s, int64_t from, int64_t past, uint8_t* codes,
                    uint8_t* scales) {
#ifdef TWINBED_AVX512
  from = encode_groups<T, Bits>(x, s, from, past, codes, scales);
#endif
  if (from >= past) return;
  const auto scale = [&](int64_t b) { return scale_of<T, Bits>(x + b * s.block, s.length(b)); };
  const bool ahead = s.block * static_cast<int64_t>(sizeof(typename T::Word)) <= kNear;
  Scale next = scale(from);
  for (int64_t b = from; b < past; ++b) {
    const Scale with = next;
    const bool more = b + 1 < past;
    if (more && ahead) next = scale(b + 1);
    encode_scaled<T, Bits>(x + b * s.block, s.length(b), s.block, with, codes + b * block_codes_bytes(s.block, Bits),
                           scales + 4 * b);
    if (more && !ahead) next = scale(b + 1);
  }
}

template <class T, int Bits, bool Add>
void decode_segment(const uint8_t* codes, const uint8_t* scales, const Segment& s, int64_t from, int64_t past,
                    typename T::Word* out) {
  for (int64_t b = from; b < past; ++b) {
    decode_block<T, Bits, Add>(codes + b * block_codes_bytes(s.block, Bits), scales + 4 * b, s.length(b), s.block,
                               out + b * s.block);
  }
}

}  // namespace
