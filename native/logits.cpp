// The three products of a classifier, for a chunk of its rows, where p is dloss / dlogits:
//
//   logits = input weight^T       input gradient = p weight       weight gradient += p^T input
//
// The first one has few rows, many classes, and every product is kept: blocks of classes are packed and stay in L2
// while all rows pass by, where a general matrix product packs for re-use over many more rows than a chunk has. The
// others are made here of pairs, with p rounded to bfloat16 and sums in float32, and where rows are exact; elsewhere
// torch makes them.
#include <algorithm>

#include "kernels.h"
#include "scores.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

constexpr int64_t PACKED_BYTES = 1 << 20;  // of a block of classes: half of a common L2
constexpr int64_t LINE = 64;               // bytes

// Every thread runs `work` on memory of its own for `count` numbers.
template <class F, class Work>
int32_t in_threads(int32_t threads, int64_t count, const Work& work) {
  bool failed = false;
#pragma omp parallel num_threads(threads)
  {
    F* memory = static_cast<F*>(thread_workspace(sizeof(F) * static_cast<size_t>(count) + 64));
    if (!memory) {
#pragma omp atomic write
      failed = true;
    }
#pragma omp barrier
    if (!failed) work(memory);
  }
  return failed ? NO_MEMORY : FINITE;
}

template <class F>
int32_t logits_as(const PartitaLogits& l) {
  using A = Sum<F>;
  constexpr int R = Shape<F>::ROWS, L = Shape<F>::LANES, P = Shape<F>::PANEL, LD = Block<A>::LD;
  const int64_t n = l.rows, C = l.classes, D = l.dim, depth = steps<F>(D), tiles = (n + R - 1) / R;
  const int64_t fitting = PACKED_BYTES / static_cast<int64_t>(sizeof(F)) / std::max<int64_t>(depth, 1) / P * P;
  const int64_t shared = (C + 4 * l.threads - 1) / (4 * l.threads);  // four blocks or more for each thread
  const int64_t keys = round_up(std::max<int64_t>(1, std::min({int64_t(Block<A>::KEYS), fitting, shared})), P);
  const int64_t blocks = (C + keys - 1) / keys;
  // Few blocks and many rows: the rows are shared out too.
  const int64_t cuts = std::max<int64_t>(1, std::min((4 * l.threads + blocks - 1) / blocks, n / (8 * R)));
  const RowView input{static_cast<const char*>(l.input), D, l.dtype};
  const RowView classes{static_cast<const char*>(l.weight), l.weight_row, l.dtype};
  const SharedWorkspace shared_rows(sizeof(F) * static_cast<size_t>(tiles * depth * L) + 64);
  F* packed = static_cast<F*>(shared_rows.data);
  if (!packed) return NO_MEMORY;
  A ones[L];
  std::fill(ones, ones + L, A(1));
  return in_threads<F>(l.threads, keys * depth + L * depth + R * LD, [&](F* panel) {
    F* temp = panel + keys * depth;
    A* tile = reinterpret_cast<A*>(temp + L * depth);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t a = n * i / tiles;
      pack_tile<F>(input, a, n * (i + 1) / tiles - a, D, packed + i * depth * L, temp);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < blocks * cuts; ++task) {
      const int64_t key = task / cuts * keys, count = std::min(keys, C - key), panels = (count + P - 1) / P;
      pack_panels<F>(classes, C, D, key / P, key / P + panels, panel, temp);
      for (int64_t i = tiles * (task % cuts) / cuts; i < tiles * (task % cuts + 1) / cuts; ++i) {
        const int64_t a = n * i / tiles, m = n * (i + 1) / tiles - a;
        A* to = static_cast<A*>(l.logits) + a * l.logits_row + key;
        for (int64_t p = 0; p < panels; ++p) {
          // The destination of a panel's scores is prefetched while they are made: 6 % faster than a copy that waits.
          for (int64_t r = 0; r < m; ++r)
            for (int64_t j = p * P; j < std::min(count, (p + 1) * P); j += LINE / static_cast<int64_t>(sizeof(A)))
              __builtin_prefetch(to + r * l.logits_row + j, 1, 2);
          score<F, LD>(m, depth, packed + i * depth * L, panel + p * depth * P, 1, tile + p * P, ones);
        }
        for (int64_t r = 0; r < m; ++r)
          std::memcpy(to + r * l.logits_row, tile + r * LD, sizeof(A) * static_cast<size_t>(count));
      }
    }
  });
}

constexpr int64_t CLASSES = 16 * Shape<float>::ROWS;  // of a block: whole register blocks of the weight gradient
constexpr int STRIDE = CLASSES + 16;                  // not a power of two: rows would fall on the same cache sets

// p of one row for classes [key, key + count), as `softmax_rows` left it: of pairs it is rounded.
template <class F>
inline const char* given_row(const PartitaLogits& l, int64_t row, int64_t key) {
  return static_cast<const char*>(l.logits) + row * l.logits_row * static_cast<int64_t>(sizeof(F)) +
         key * Factor<F>::BYTES;
}

// input gradient = p weight. Each thread has a range of rows, whose sums it holds over all blocks of classes.
template <class F>
int32_t input_gradient_as(const PartitaLogits& l) {
  using A = Sum<F>;
  constexpr int R = Shape<F>::ROWS, W = Vec<F>::W;
  const int64_t n = l.rows, C = l.classes, D = l.dim, padded = round_up(D, W);
  const int64_t most = std::min<int64_t>((n + l.threads - 1) / l.threads, 32 * R), parts = (n + most - 1) / most;
  const RowView classes{static_cast<const char*>(l.weight), l.weight_row, l.dtype};
  const bool lies = Factor<F>::STEP == 1 && D == padded;
  const int64_t packed = lies ? 0 : steps<F>(CLASSES) * padded;
  return in_threads<F>(l.threads, packed + R * STRIDE + most * padded, [&](F* panel) {
    F* tile = panel + packed;
    A* sums = reinterpret_cast<A*>(tile + R * STRIDE);
#pragma omp for schedule(dynamic, 1)
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = n * part / parts, rows = n * (part + 1) / parts - first;
      std::memset(sums, 0, sizeof(A) * static_cast<size_t>(rows * padded));
      for (int64_t key = 0; key < C; key += CLASSES) {
        const int64_t count = std::min(CLASSES, C - key);
        const F* right = lies ? reinterpret_cast<const F*>(rows_from(classes, key).data) : panel;
        if (!lies) pack_rows<F>(classes, D, padded, key, key + count, panel);
        for (int64_t a = 0; a < rows; a += R) {
          const int64_t m = std::min<int64_t>(R, rows - a);
          for (int64_t r = 0; r < m; ++r) {
            F* to = tile + r * STRIDE;
            if (count % Factor<F>::STEP) to[count / Factor<F>::STEP] = F{};
            std::memcpy(to, given_row<F>(l, first + a + r, key), static_cast<size_t>(count * Factor<F>::BYTES));
          }
          accumulate<F, 1, STRIDE>(m, steps<F>(count), tile, right, lies ? l.weight_row : padded, padded,
                                   sums + a * padded, padded, nullptr);
        }
      }
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(static_cast<A*>(const_cast<void*>(l.input)) + (first + r) * D, sums + r * padded,
                    sizeof(A) * static_cast<size_t>(D));
    }
  });
}

// weight gradient += p^T input: the rows of p are copied for a block of classes, those of the input once for all; as
// pairs, two neighbouring rows are one.
template <class F>
int32_t weight_gradient_as(const PartitaLogits& l) {
  using A = Sum<F>;
  constexpr int R = Shape<F>::ROWS, STEP = Factor<F>::STEP;
  const int64_t n = l.rows, C = l.classes, D = l.dim, padded = round_up(D, Vec<F>::W), length = steps<F>(n);
  const SharedWorkspace shared_rows(sizeof(F) * static_cast<size_t>(length * padded) + 64);
  F* input = static_cast<F*>(shared_rows.data);
  if (!input) return NO_MEMORY;
  const RowView rows{static_cast<const char*>(l.input), D, l.dtype};
  A* weight = static_cast<A*>(const_cast<void*>(l.weight));
  return in_threads<F>(l.threads, length * STRIDE + R * padded, [&](F* tile) {
    A* sums = reinterpret_cast<A*>(tile + length * STRIDE);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < length; ++r)
      pack_rows<F>(rows, D, padded, STEP * r, std::min(STEP * (r + 1), n), input + r * padded);
#pragma omp for schedule(dynamic, 1)
    for (int64_t key = 0; key < C; key += CLASSES) {
      const int64_t count = std::min(CLASSES, C - key);
      for (int64_t r = 0; r < length; ++r) {
        const char* row = given_row<F>(l, STEP * r, key);
        if constexpr (STEP > 1) {
          const char* odd = 2 * r + 1 < n ? given_row<F>(l, 2 * r + 1, key) : nullptr;
          pair_rows(reinterpret_cast<const uint16_t*>(row), reinterpret_cast<const uint16_t*>(odd), count, count,
                    tile + r * STRIDE);
        } else {
          std::memcpy(tile + r * STRIDE, row, sizeof(F) * static_cast<size_t>(count));
        }
      }
      for (int64_t j = 0; j < count; j += R) {
        const int64_t m = std::min<int64_t>(R, count - j);
        A* to = weight + (key + j) * D;
        if (padded != D) std::memset(sums, 0, sizeof(A) * static_cast<size_t>(R * padded));
        accumulate<F, STRIDE, 1>(m, length, tile + j, input, padded, padded, padded == D ? to : sums, padded, nullptr);
        if (padded == D) continue;
        for (int64_t r = 0; r < m; ++r)
          for (int64_t k = 0; k < D; ++k) to[r * D + k] += sums[r * padded + k];
      }
    }
  });
}

}  // namespace

int32_t logits(const PartitaLogits& l) {
  return with_factors(l.dtype, [&](auto f) { return logits_as<decltype(f)>(l); });
}

int32_t input_gradient(const PartitaLogits& l) {
  return with_factors(l.dtype, [&](auto f) { return input_gradient_as<decltype(f)>(l); });
}

int32_t weight_gradient(const PartitaLogits& l) {
  return with_factors(l.dtype, [&](auto f) { return weight_gradient_as<decltype(f)>(l); });
}

}  // namespace PARTITA_ISA
}  // namespace partita
