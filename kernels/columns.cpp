// Kept columns of a matrix, taken out and put back, for matmuls that are pruned. Twin in plain torch: pruned.py.
//
// Elements are 4 or 2 bytes that nobody looks into. Rows do not depend on each other.

#include <cstdint>

namespace {

template <class Word>
void gather(const void* x, int64_t x_stride, int64_t rows, const int32_t* kept, int64_t num_kept, void* out) {
  auto* to = static_cast<Word*>(out);
  for (int64_t r = 0; r < rows; ++r) {
    const Word* __restrict row = static_cast<const Word*>(x) + r * x_stride;
    Word* __restrict result = to + r * num_kept;
    for (int64_t j = 0; j < num_kept; ++j) result[j] = row[kept[j]];
  }
}

// Every element of a row is written once, in order: `place` says where among the kept ones it stands, -1: nowhere.
template <class Word>
void scatter(const void* y, int64_t rows, int64_t num_kept, const int32_t* place, int64_t columns, void* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const Word* __restrict row = static_cast<const Word*>(y) + r * num_kept;
    Word* __restrict result = static_cast<Word*>(out) + r * columns;
    for (int64_t k = 0; k < columns; ++k) result[k] = place[k] < 0 ? Word{0} : row[place[k]];
  }
}

}  // namespace

extern "C" {

// out[r, j] = x[r, kept[j]]; strides in elements
int twinbed_gather_columns(const void* x, int64_t x_stride, int64_t rows, int word_bytes, const int32_t* kept,
                           int64_t num_kept, void* out) {
  if (word_bytes == 4) gather<uint32_t>(x, x_stride, rows, kept, num_kept, out);
  if (word_bytes == 2) gather<uint16_t>(x, x_stride, rows, kept, num_kept, out);
  return word_bytes == 4 || word_bytes == 2 ? 0 : 2;
}

// out[r, k] = y[r, place[k]], or 0 where place[k] is -1
int twinbed_scatter_columns(const void* y, int64_t rows, int64_t num_kept, int word_bytes, const int32_t* place,
                            int64_t columns, void* out) {
  if (word_bytes == 4) scatter<uint32_t>(y, rows, num_kept, place, columns, out);
  if (word_bytes == 2) scatter<uint16_t>(y, rows, num_kept, place, columns, out);
  return word_bytes == 4 || word_bytes == 2 ? 0 : 2;
}

}  // extern "C"
