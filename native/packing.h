// Rows of any supported dtype into the layouts the register block reads.
//
//   panel   keys (or rows) of one panel, feature-major: panel[k][j]; missing keys are 0
//   rows    row-major with a padded width; missing columns are 0
//
// As pairs (F = Pair), a panel holds two neighbouring features in a lane and moves them as one number; rows hold the
// same column of two neighbouring rows.
#pragma once
#include "gemm.h"
#include "interface.h"
#include "simd.h"
#include "workspace.h"

namespace partita {
namespace PARTITA_ISA {

PARTITA_INLINE float from_bfloat16(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
PARTITA_INLINE uint16_t to_bfloat16(float f) {  // to the nearest even; of a number
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
PARTITA_INLINE float from_float16(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, body = h & 0x7fffu;
  uint32_t bits;
  float f;
  if (body >= 0x7c00u) {
    bits = sign | 0x7f800000u | ((body & 0x3ffu) << 13);
  } else if (body >= 0x400u) {
    bits = sign | ((body << 13) + 0x38000000u);
  } else {  // subnormal: body * 2^-24, exact
    f = static_cast<float>(body) * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  std::memcpy(&f, &bits, 4);
  return f;
#endif
}

inline size_t dtype_size(int32_t dtype) { return dtype == PARTITA_FLOAT64 ? 8 : dtype == PARTITA_FLOAT32 ? 4 : 2; }

// run(f) with an f of the type that the factors of operands of this dtype are held as: half precision is widened,
// but for bfloat16 where the processor multiplies pairs.
template <class Run>
inline auto with_factors(int32_t dtype, const Run& run) {
#if defined(PARTITA_PAIRS)
  if (dtype == PARTITA_BFLOAT16) return run(Pair{});
#endif
  return dtype == PARTITA_FLOAT64 ? run(double{}) : run(float{});
}

template <class A>
PARTITA_INLINE A element(const void* data, int64_t i, int32_t dtype) {
  switch (dtype) {
    case PARTITA_FLOAT32: return static_cast<A>(static_cast<const float*>(data)[i]);
    case PARTITA_FLOAT64: return static_cast<A>(static_cast<const double*>(data)[i]);
    case PARTITA_BFLOAT16: return static_cast<A>(from_bfloat16(static_cast<const uint16_t*>(data)[i]));
    default: return static_cast<A>(from_float16(static_cast<const uint16_t*>(data)[i]));
  }
}

// to[k] = factor * from[k] for k < n, 0 for n <= k < padded.
template <class A>
inline void convert_row(const void* from, int64_t at, int32_t dtype, int64_t n, int64_t padded, A factor, A* to) {
  switch (dtype) {
    case PARTITA_FLOAT32: {
      const float* f = static_cast<const float*>(from) + at;
      for (int64_t k = 0; k < n; ++k) to[k] = static_cast<A>(f[k]) * factor;
      break;
    }
    case PARTITA_FLOAT64: {
      const double* f = static_cast<const double*>(from) + at;
      for (int64_t k = 0; k < n; ++k) to[k] = static_cast<A>(f[k]) * factor;
      break;
    }
    case PARTITA_BFLOAT16: {
      const uint16_t* f = static_cast<const uint16_t*>(from) + at;
      for (int64_t k = 0; k < n; ++k) to[k] = static_cast<A>(from_bfloat16(f[k])) * factor;
      break;
    }
    default: {
      const uint16_t* f = static_cast<const uint16_t*>(from) + at;
      int64_t k = 0;
#if defined(__F16C__)
      for (; k + 8 <= n; k += 8) {
        float eight[8];
        _mm256_storeu_ps(eight, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(f + k))));
        for (int i = 0; i < 8; ++i) to[k + i] = static_cast<A>(eight[i]) * factor;
      }
#endif
      for (; k < n; ++k) to[k] = static_cast<A>(from_float16(f[k])) * factor;
    }
  }
  for (int64_t k = n; k < padded; ++k) to[k] = 0;
}

// The same for pairs, whose numbers are as they are in memory.
inline void convert_row(const void* from, int64_t at, int64_t n, int64_t padded, Pair* to) {
  std::memcpy(to, static_cast<const uint16_t*>(from) + at, sizeof(uint16_t) * static_cast<size_t>(n));
  std::memset(reinterpret_cast<char*>(to) + sizeof(uint16_t) * n, 0, static_cast<size_t>(4 * padded - 2 * n));
}

// Transpose W x W: log2 W rounds of a perfect shuffle. Row i is multiplied by factor[i], if there is one. Unless WHOLE,
// rows may be missing (null), which are zeros.
template <class F, bool TIMES, bool WHOLE>
PARTITA_INLINE void transpose(const F* const* rows, int64_t k, const F* factor, F* to, int64_t ldt) {
  using V = Vec<F>;
  constexpr int W = V::W;
  typename V::T a[W], b[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) a[i] = WHOLE || rows[i] ? V::load(rows[i] + k) : V::set({});
#pragma GCC unroll 4
  for (int round = 1; round < W; round *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < W / 2; ++i) {
      b[2 * i] = V::interleave_low(a[i], a[i + W / 2]);
      b[2 * i + 1] = V::interleave_high(a[i], a[i + W / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    if constexpr (TIMES)
      V::store(to + i * ldt, V::mul(a[i], V::load(factor)));
    else
      V::store(to + i * ldt, a[i]);
  }
}

// W rows (null: zeros) of n steps, transposed into to[k * ldt + j].
template <class F, bool TIMES = false>
inline void transpose_rows(const F* const* rows, int64_t n, F* to, int64_t ldt, const F* factor = nullptr) {
  constexpr int W = Vec<F>::W;
  bool whole = true;
  for (int i = 0; i < W; ++i) whole = whole && rows[i];
  int64_t k = 0;
  if (whole)
    for (; k + W <= n; k += W) transpose<F, TIMES, true>(rows, k, factor, to + k * ldt, ldt);
  else
    for (; k + W <= n; k += W) transpose<F, TIMES, false>(rows, k, factor, to + k * ldt, ldt);
  for (; k < n; ++k)
    for (int i = 0; i < W; ++i) {
      if constexpr (TIMES)
        to[k * ldt + i] = rows[i] ? rows[i][k] * factor[i] : F(0);
      else
        to[k * ldt + i] = rows[i] ? rows[i][k] : F{};
    }
}

// Keys or values of one group in memory.
struct RowView {
  const char* data = nullptr;
  int64_t row = 0;  // in elements
  int32_t dtype = 0;
};

// From `row` on, of one entry of an operand of this dtype.
inline RowView view_of(const PartitaOperand& o, int32_t dtype, int64_t entry, int64_t row = 0) {
  const int64_t at = (o.offset[entry] + row * o.row) * static_cast<int64_t>(dtype_size(dtype));
  return {static_cast<const char*>(o.data) + at, o.row, dtype};
}

// The same rows from row `first` on.
inline RowView rows_from(const RowView& rows, int64_t first) {
  return {rows.data + first * rows.row * static_cast<int64_t>(dtype_size(rows.dtype)), rows.row, rows.dtype};
}

// A row of D numbers as steps: in memory where it is stored as such, or else converted in `temp`.
template <class F>
PARTITA_INLINE const F* row_steps(const RowView& from, int64_t j, int64_t D, F* temp) {
  if (from.dtype == Factor<F>::DTYPE && D % Factor<F>::STEP == 0)
    return reinterpret_cast<const F*>(from.data + j * from.row * Factor<F>::BYTES);
  if constexpr (Factor<F>::STEP > 1)
    convert_row(from.data, j * from.row, D, steps<F>(D), temp);
  else
    convert_row<F>(from.data, j * from.row, from.dtype, D, D, F(1), temp);
  return temp;
}

// Rows [first, first + m) of D numbers, m up to LANES, as a register block reads them: to[k * LANES + r]; temp holds W.
template <class F>
inline void pack_tile(const RowView& from, int64_t first, int64_t m, int64_t D, F* to, F* temp) {
  constexpr int W = Vec<F>::W, L = Shape<F>::LANES;
  const int64_t n = steps<F>(D);
  for (int half = 0; half < L; half += W) {
    const F* at[W];
    // Lanes past m are never read: they repeat a row, so that whole vectors move.
    for (int j = 0; j < W; ++j) at[j] = row_steps<F>(from, first + (half + j < m ? half + j : m - 1), D, temp + j * n);
    transpose_rows<F>(at, n, to + half, L);
  }
}

// Panels [first, last) of keys below `end`; temp holds W rows of D.
template <class F>
inline void pack_panels(const RowView& from, int64_t end, int64_t D, int64_t first, int64_t last, F* to, F* temp) {
  constexpr int W = Vec<F>::W, P = Shape<F>::PANEL;
  const int64_t n = steps<F>(D);
  for (int64_t p = first; p < last; ++p, to += n * P)
    for (int half = 0; half < 2; ++half) {
      const F* rows[W];
      for (int i = 0; i < W; ++i) {
        const int64_t j = p * P + half * W + i;
        rows[i] = j < end ? row_steps<F>(from, j, D, temp + i * n) : nullptr;
      }
      transpose_rows<F>(rows, n, to + half * W, P);
    }
}

// One row of pairs from two rows of n numbers; of the last one of an odd number of rows, `odd` is null.
inline void pair_rows(const uint16_t* even, const uint16_t* odd, int64_t n, int64_t padded, Pair* to) {
  int64_t v = 0;
  if (odd)
    for (; v < n; ++v) to[v] = {even[v], odd[v]};
  else
    for (; v < n; ++v) to[v] = {even[v], 0};
  for (; v < padded; ++v) to[v] = {0, 0};
}

// n numbers, a multiple of W, rounded to bfloat16, to the nearest even: those of two neighbouring columns are a pair.
template <class F>
inline void round_row(const Sum<F>* from, int64_t n, F* to) {
  using V = Vec<Sum<F>>;
  int64_t k = 0;
  for (; k + 2 * V::W <= n; k += 2 * V::W)
    Vec<F>::store(to + k / 2, Vec<F>::round(V::load(from + k), V::load(from + k + V::W)));
  if (k == n) return;
  F last[V::W];
  Vec<F>::store(last, Vec<F>::round(V::load(from + k), V::set(0)));
  std::memcpy(to + k / 2, last, sizeof(last) / 2);
}

// Rows [first, last) with their width padded; `first` begins a step.
template <class F>
inline void pack_rows(const RowView& from, int64_t n, int64_t padded, int64_t first, int64_t last, F* to) {
  constexpr int STEP = Factor<F>::STEP;
  for (int64_t j = first; j < last; j += STEP, to += padded) {
    if constexpr (STEP > 1) {
      const uint16_t* even = reinterpret_cast<const uint16_t*>(from.data) + j * from.row;
      pair_rows(even, j + 1 < last ? even + from.row : nullptr, n, padded, to);
    } else {
      convert_row<F>(from.data, j * from.row, from.dtype, n, padded, F(1), to);
    }
  }
}

}  // namespace PARTITA_ISA
}  // namespace partita
