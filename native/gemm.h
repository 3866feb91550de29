// The register block: an M x (2 vectors) piece of a product, M rows of the left factor broadcast one number at a time.
//
//   acc[r][v] += sum_k a[k * AK + r * AR] * b[k * ldb + v]
//
// The factors are numbers of the type of the sums, or pairs of bfloat16 numbers (F = Pair), of which one step takes two
// of the inner dimension.
//
// The strides of the left factor are compile-time, so all M broadcasts share one pointer. Three forms serve everything:
// packed rows (AK = LANES, AR = 1), a score tile as it is (AK = 1, AR = its stride), a score tile transposed (the
// reverse).
#pragma once
#include "simd.h"

namespace partita {
namespace PARTITA_ISA {

template <class F>
struct Shape {
  static constexpr int W = Vec<F>::W;
  static constexpr int ROWS = Vec<F>::ROWS;
  static constexpr int LANES = ROWS > 8 ? 16 : 8;  // rows of a packed tile, padded
  static constexpr int PANEL = 2 * W;              // keys of a packed panel
};

// Sums over a long dim are cut into pieces of this length, added up: a plain chain of 4096 additions loses three times
// more.
constexpr int64_t CHAIN = 384;

// The right factor comes from the second-level cache, and is prefetched this many rows ahead: 2 to 4 %
// faster with 128 features, 1 to 3 % with 64.
constexpr int64_t AHEAD = 32;

template <class F, int M, int N, int AK, int AR>
PARTITA_INLINE void multiply(int64_t n, const F* a, const F* b, int64_t ldb, typename Vec<Sum<F>>::T (&acc)[M][N]) {
  using V = Vec<F>;
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) acc[r][v] = Vec<Sum<F>>::set(0);
#pragma GCC unroll 2
  for (int64_t k = 0; k < n; ++k) {
    typename V::T x[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      x[v] = V::load(b + v * V::W);
      __builtin_prefetch(b + AHEAD * ldb + v * V::W, 0, 3);
    }
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r) {
      const typename V::T y = V::set(a[r * AR]);
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) acc[r][v] = V::fma(y, x[v], acc[r][v]);
    }
    a += AK;
    b += ldb;
  }
}

// A product of a row as it is stored: a factor of the row is applied here where the packed row could not hold it
// (pairs are not rounded twice), and is part of the row otherwise.
template <class F>
PARTITA_INLINE typename Vec<Sum<F>>::T scaled(typename Vec<Sum<F>>::T x, const Sum<F>* factor) {
  using V = Vec<Sum<F>>;
  if constexpr (Factor<F>::STEP > 1)
    return V::mul(x, V::set(*factor));
  else
    return x;
}

// s[r][j] = factor[r] sum_k a[k][r] panel[k][j], over n steps, for `panels` consecutive panels.
template <class F, int M, int LD>
void score_rows(int64_t n, const F* a, const F* panel, int64_t panels, Sum<F>* s, const Sum<F>* factor) {
  using V = Vec<Sum<F>>;
  constexpr int P = Shape<F>::PANEL, L = Shape<F>::LANES;
  for (int64_t p = 0; p < panels; ++p, panel += n * P, s += P) {
    for (int64_t k = 0; k == 0 || k < n; k += CHAIN) {
      typename V::T acc[M][2];
      multiply<F, M, 2, L, 1>(n - k < CHAIN ? n - k : CHAIN, a + k * L, panel + k * P, P, acc);
      if (k > 0) {
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r) {
          acc[r][0] = V::add(V::load(s + r * LD), acc[r][0]);
          acc[r][1] = V::add(V::load(s + r * LD + V::W), acc[r][1]);
        }
      }
      if (k + CHAIN < n) {
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r) {
          V::store(s + r * LD, acc[r][0]);
          V::store(s + r * LD + V::W, acc[r][1]);
        }
      } else {
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r) {
          V::store(s + r * LD, scaled<F>(acc[r][0], factor + r));
          V::store(s + r * LD + V::W, scaled<F>(acc[r][1], factor + r));
        }
      }
    }
  }
}

// c[r][v] = keep[r] * c[r][v] + sum_{k < n} a[k * AK + r * AR] b[k][v] for v < width, a multiple of W.
template <class F, int M, int N, int AK, int AR>
PARTITA_INLINE void accumulate_columns(int64_t n, const F* a, const F* b, int64_t ldb, Sum<F>* c, int64_t ldc,
                                       const Sum<F>* keep) {
  using V = Vec<Sum<F>>;
  typename V::T acc[M][N];
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) __builtin_prefetch(c + r * ldc + v * V::W, 1, 3);
  multiply<F, M, N, AK, AR>(n, a, b, ldb, acc);
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      Sum<F>* to = c + r * ldc + v * V::W;
      V::store(to, keep ? V::fma(V::set(keep[r]), V::load(to), acc[r][v]) : V::add(V::load(to), acc[r][v]));
    }
  }
}
template <class F, int M, int AK, int AR>
void accumulate_rows(int64_t n, const F* a, const F* b, int64_t ldb, int64_t width, Sum<F>* c, int64_t ldc,
                     const Sum<F>* keep) {
  constexpr int W = Vec<F>::W;
  int64_t v = 0;
  for (; v + 2 * W <= width; v += 2 * W) accumulate_columns<F, M, 2, AK, AR>(n, a, b + v, ldb, c + v, ldc, keep);
  if (v < width) accumulate_columns<F, M, 1, AK, AR>(n, a, b + v, ldb, c + v, ldc, keep);
}

// Any number of rows up to ROWS, as a few blocks of the heights that are compiled: the tallest that fits, then the
// rest.
template <class F, int M>
struct Lower {  // the next height below M
  static constexpr int ROWS = M > 12 ? M - 1 : M > 10 ? 10 : M > 8 ? 8 : M > 6 ? 6 : M > 4 ? 4 : M > 2 ? 2 : 1;
};

template <class F, int LD, int M = Vec<F>::ROWS>
PARTITA_INLINE void score(int64_t m, int64_t n, const F* a, const F* panel, int64_t panels, Sum<F>* s,
                          const Sum<F>* factor) {
  if (m >= M) {
    score_rows<F, M, LD>(n, a, panel, panels, s, factor);
    a += M;
    s += M * LD;
    factor = factor ? factor + M : factor;
    m -= M;
  }
  if constexpr (M > 1) {
    if (m > 0) score<F, LD, Lower<F, M>::ROWS>(m, n, a, panel, panels, s, factor);
  }
}

template <class F, int AK, int AR, int M = Vec<F>::ROWS>
PARTITA_INLINE void accumulate(int64_t m, int64_t n, const F* a, const F* b, int64_t ldb, int64_t width, Sum<F>* c,
                               int64_t ldc, const Sum<F>* keep) {
  if (m >= M) {
    accumulate_rows<F, M, AK, AR>(n, a, b, ldb, width, c, ldc, keep);
    a += M * AR;
    c += M * ldc;
    keep = keep ? keep + M : keep;
    m -= M;
  }
  if constexpr (M > 1) {
    if (m > 0) accumulate<F, AK, AR, Lower<F, M>::ROWS>(m, n, a, b, ldb, width, c, ldc, keep);
  }
}

}  // namespace PARTITA_ISA
}  // namespace partita
