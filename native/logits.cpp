// logits = input weight^T for a chunk of rows of a classifier: few rows, many classes, every product kept.
//
// Blocks of classes are packed and stay in L2 while all rows pass by. A general matrix product packs for re-use over
// many more rows than a chunk has; the other two products of a cross entropy have long inner sums, which it does best.
#include <algorithm>

#include "kernels.h"
#include "scores.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

constexpr int64_t PACKED_BYTES = 1 << 20;  // of a block of classes: half of a common L2
constexpr int64_t LINE = 64;               // bytes

template <class A>
int32_t logits_as(const PartitaLogits& l) {
  constexpr int R = Shape<A>::ROWS, L = Shape<A>::LANES, P = Shape<A>::PANEL, LD = Block<A>::LD;
  const int64_t n = l.rows, C = l.classes, D = l.dim, tiles = (n + R - 1) / R;
  const int64_t fitting = PACKED_BYTES / static_cast<int64_t>(sizeof(A)) / std::max<int64_t>(D, 1) / P * P;
  const int64_t shared = (C + 4 * l.threads - 1) / (4 * l.threads);  // four blocks or more for each thread
  const int64_t keys = round_up(std::max<int64_t>(1, std::min({int64_t(Block<A>::KEYS), fitting, shared})), P);
  const int64_t blocks = (C + keys - 1) / keys;
  // Few blocks and many rows: the rows are shared out too.
  const int64_t cuts = std::max<int64_t>(1, std::min((4 * l.threads + blocks - 1) / blocks, n / (8 * R)));
  const A* input = static_cast<const A*>(l.input);
  const RowView classes{static_cast<const char*>(l.weight), l.weight_row, l.dtype};
  const int64_t bytes = static_cast<int64_t>(sizeof(A)) * tiles * D * L;
  const SharedWorkspace shared_rows(static_cast<size_t>(bytes) + 64);
  A* packed = static_cast<A*>(shared_rows.data);
  if (!packed) return NO_MEMORY;
  bool failed = false;
#pragma omp parallel num_threads(l.threads)
  {
    A* panel = static_cast<A*>(thread_workspace(sizeof(A) * static_cast<size_t>(keys * D + R * LD) + 64));
    A* tile = panel + keys * D;
    if (!panel) {
#pragma omp atomic write
      failed = true;
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t a = n * i / tiles;
      pack_tile<A>(input + a * D, n * (i + 1) / tiles - a, D, D, packed + i * D * L);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < blocks * cuts; ++task) {
      if (failed) continue;
      const int64_t key = task / cuts * keys, count = std::min(keys, C - key), panels = (count + P - 1) / P;
      pack_panels<A>(classes, C, D, key / P, key / P + panels, panel, nullptr);
      for (int64_t i = tiles * (task % cuts) / cuts; i < tiles * (task % cuts + 1) / cuts; ++i) {
        const int64_t a = n * i / tiles, m = n * (i + 1) / tiles - a;
        A* to = static_cast<A*>(l.logits) + a * l.logits_row + key;
        for (int64_t p = 0; p < panels; ++p) {
          // Where a panel's scores will lie is asked for while they are made: 6 % faster than a copy that waits for it.
          for (int64_t r = 0; r < m; ++r)
            for (int64_t j = p * P; j < std::min(count, (p + 1) * P); j += LINE / static_cast<int64_t>(sizeof(A)))
              __builtin_prefetch(to + r * l.logits_row + j, 1, 2);
          score<A, LD>(m, D, packed + i * D * L, panel + p * D * P, 1, tile + p * P);
        }
        for (int64_t r = 0; r < m; ++r)
          std::memcpy(to + r * l.logits_row, tile + r * LD, sizeof(A) * static_cast<size_t>(count));
      }
    }
  }
  return failed ? NO_MEMORY : FINITE;
}

}  // namespace

int32_t logits(const PartitaLogits& l) {
  return l.dtype == PARTITA_FLOAT64 ? logits_as<double>(l) : logits_as<float>(l);
}

}  // namespace PARTITA_ISA
}  // namespace partita
