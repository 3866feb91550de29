// Rows of any supported dtype into the layouts the register block reads.
//
//   panel   keys (or rows) of one panel, feature-major: panel[k][j]; missing keys are 0
//   rows    row-major with a padded width; missing columns are 0
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

// Transpose W x W: log2 W rounds of a perfect shuffle. Row i is multiplied by factor[i], if there is one.
template <class A, bool TIMES>
PARTITA_INLINE void transpose(const A* const* rows, int64_t k, const A* factor, A* to, int64_t ldt) {
  using V = Vec<A>;
  constexpr int W = V::W;
  typename V::T a[W], b[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) a[i] = V::load(rows[i] + k);
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
  for (int i = 0; i < W; ++i) V::store(to + i * ldt, TIMES ? V::mul(a[i], V::load(factor)) : a[i]);
}

// W rows (null: zeros) of D features, transposed into to[k * ldt + j].
template <class A, bool TIMES = false>
inline void transpose_rows(const A* const* rows, int64_t D, A* to, int64_t ldt, const A* factor = nullptr) {
  constexpr int W = Vec<A>::W;
  bool whole = true;
  for (int i = 0; i < W; ++i) whole = whole && rows[i];
  int64_t k = 0;
  if (whole)
    for (; k + W <= D; k += W) transpose<A, TIMES>(rows, k, factor, to + k * ldt, ldt);
  for (; k < D; ++k)
    for (int i = 0; i < W; ++i) to[k * ldt + i] = rows[i] ? rows[i][k] * (TIMES ? factor[i] : A(1)) : A(0);
}

// Up to LANES rows of D numbers, one after the other in `rows`, as a register block reads them: to[k * LANES + r].
template <class A>
inline void pack_tile(const A* rows, int64_t m, int64_t D, int64_t ld, A* to) {
  constexpr int W = Vec<A>::W, L = Shape<A>::LANES;
  for (int half = 0; half < L; half += W) {
    const A* at[W];
    // Lanes past m are never read: they repeat a row, so that whole vectors move.
    for (int j = 0; j < W; ++j) at[j] = rows + (half + j < m ? half + j : m - 1) * ld;
    transpose_rows<A>(at, D, to + half, L);
  }
}

// Where keys or values of one group lie.
struct RowView {
  const char* data = nullptr;
  int64_t row = 0;  // in elements
  int32_t dtype = 0;
};

// Panels [first, last) of keys below `end`; temp holds W rows of D.
template <class A>
inline void pack_panels(const RowView& from, int64_t end, int64_t D, int64_t first, int64_t last, A* to, A* temp) {
  constexpr int W = Vec<A>::W, P = Shape<A>::PANEL;
  const bool same = from.dtype == (sizeof(A) == 4 ? PARTITA_FLOAT32 : PARTITA_FLOAT64);
  for (int64_t p = first; p < last; ++p, to += D * P)
    for (int half = 0; half < 2; ++half) {
      const A* rows[W];
      for (int i = 0; i < W; ++i) {
        const int64_t j = p * P + half * W + i;
        if (j >= end) {
          rows[i] = nullptr;
        } else if (same) {
          rows[i] = reinterpret_cast<const A*>(from.data) + j * from.row;
        } else {
          convert_row<A>(from.data, j * from.row, from.dtype, D, D, A(1), temp + i * D);
          rows[i] = temp + i * D;
        }
      }
      transpose_rows<A>(rows, D, to + half * W, P);
    }
}

// Rows [first, last) with their width padded.
template <class A>
inline void pack_rows(const RowView& from, int64_t n, int64_t padded, int64_t first, int64_t last, A* to) {
  for (int64_t j = first; j < last; ++j, to += padded)
    convert_row<A>(from.data, j * from.row, from.dtype, n, padded, A(1), to);
}

}  // namespace PARTITA_ISA
}  // namespace partita
