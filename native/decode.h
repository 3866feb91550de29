// One or two rows against many keys, as in decoding: keys and values are read once, in place. To pack them, as for a
// register block of rows, would cost more than the products.
//
//   s[j] = <query, key_j>    c = keep c + sum_j e_j value_j
#pragma once
#include "exp.h"
#include "packing.h"

namespace partita {
namespace PARTITA_ISA {

constexpr int64_t DECODE_ROWS = 2, DECODE_DIM = 512;

// Numbers of a query as `decode_scores` reads it: whole vectors, then its last W numbers with 0 for those that came
// before.
template <class A>
inline void decode_query(const A* packed, int64_t step, int64_t D, A* to) {
  constexpr int W = Vec<A>::W;
  const int64_t whole = D / W * W;
  for (int64_t k = 0; k < whole; ++k) to[k] = packed[k * step];
  for (int64_t k = D - W; k < D && whole < D; ++k) to[whole + k - (D - W)] = k < whole ? A(0) : packed[k * step];
}

// s[j] for keys first + j, j < n, n a multiple of W; past `end` the last key is repeated. D is at least W.
template <class A>
inline void decode_scores(const A* query, int64_t D, const RowView& keys, int64_t first, int64_t n, int64_t end, A* s) {
  using V = Vec<A>;
  const A* data = reinterpret_cast<const A*>(keys.data);
  const int64_t whole = D / V::W * V::W;
  for (int64_t j = 0; j < n; j += V::W)
    V::store(s + j, reduce_lanes<A, true>([&](int i) {
               const int64_t key = first + j + i;
               const A* row = data + (key < end ? key : end - 1) * keys.row;
               typename V::T sum = V::mul(V::load(query), V::load(row));
               for (int64_t k = V::W; k < whole; k += V::W) sum = V::fma(V::load(query + k), V::load(row + k), sum);
               if (whole < D) sum = V::fma(V::load(query + whole), V::load(row + D - V::W), sum);
               return sum;
             }));
}

// N vectors of the values of n keys, in two chains each: one alone would wait for its own sums.
template <class A, int N>
PARTITA_INLINE void decode_accumulate_columns(int64_t n, const A* e, const A* value, int64_t ld, A* c, A keep) {
  using V = Vec<A>;
  typename V::T even[N], odd[N];
#pragma GCC unroll 4
  for (int v = 0; v < N; ++v) even[v] = odd[v] = V::set(0);
  int64_t j = 0;
  for (; j + 2 <= n; j += 2, value += 2 * ld) {
    const typename V::T x = V::set(e[j]), y = V::set(e[j + 1]);
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      even[v] = V::fma(x, V::load(value + v * V::W), even[v]);
      odd[v] = V::fma(y, V::load(value + ld + v * V::W), odd[v]);
    }
  }
  for (int v = 0; v < N; ++v) {
    if (j < n) even[v] = V::fma(V::set(e[j]), V::load(value + v * V::W), even[v]);
    V::store(c + v * V::W, V::fma(V::set(keep), V::load(c + v * V::W), V::add(even[v], odd[v])));
  }
}

// N vectors of the values of n keys in one chain each, as a register block sums them: exact rows are the same by both.
template <class A, int N>
PARTITA_INLINE void accumulate_columns_in_order(int64_t n, const A* e, const A* value, int64_t ld, A* c, A keep) {
  using V = Vec<A>;
  typename V::T sum[N];
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) sum[v] = V::set(0);
  for (int64_t j = 0; j < n; ++j, value += ld) {
    const typename V::T x = V::set(e[j]);
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) sum[v] = V::fma(x, V::load(value + v * V::W), sum[v]);
  }
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) V::store(c + v * V::W, V::fma(V::set(keep), V::load(c + v * V::W), sum[v]));
}

template <class A>
inline void accumulate_in_order(int64_t n, const A* e, const A* value, int64_t ld, int64_t width, A* c, A keep) {
  constexpr int W = Vec<A>::W;
  int64_t v = 0;
  for (; v + 8 * W <= width; v += 8 * W) accumulate_columns_in_order<A, 8>(n, e, value + v, ld, c + v, keep);
  for (; v + 4 * W <= width; v += 4 * W) accumulate_columns_in_order<A, 4>(n, e, value + v, ld, c + v, keep);
  for (; v < width; v += W) accumulate_columns_in_order<A, 1>(n, e, value + v, ld, c + v, keep);
}

template <class A>
inline void decode_accumulate(int64_t n, const A* e, const A* value, int64_t ld, int64_t width, A* c, A keep) {
  constexpr int W = Vec<A>::W;
  int64_t v = 0;
  for (; v + 4 * W <= width; v += 4 * W) decode_accumulate_columns<A, 4>(n, e, value + v, ld, c + v, keep);
  for (; v < width; v += W) decode_accumulate_columns<A, 1>(n, e, value + v, ld, c + v, keep);
}

}  // namespace PARTITA_ISA
}  // namespace partita
