// Backward, the driver: chunks of rows, key blocks, partial sums added in a fixed order. The arithmetic is in backward.h.
#include "backward.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

// Rows [at, at + n) of a patch: the rows of its range, entry after entry.
template <class A>
void pack_chunk(const BackCall<A>& call, const Patch& patch, int64_t at, int64_t n, int64_t tiles, Bench<A>& t) {
  constexpr int L = Shape<A>::LANES;
  const PartitaProblem& p = call.p;
  const PartitaGradients& g = call.g;
  const A ln2 = static_cast<A>(LN2);
  const int64_t height = patch.row_end - patch.row;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t a = n * i / tiles, b = n * (i + 1) / tiles;
    for (int64_t r = a; r < b; ++r) {
      const int64_t f = at + r, entry = call.plan.entries[call.plan.entry_begin[patch.group] + f / height];
      const Row row = t.row[r] = make_row(p, entry, patch.row + f % height);
      const double peak = static_cast<const double*>(g.peak)[row.out];
      const bool empty = peak == neg_inf<double>();  // its upstream gradients mean nothing, and may be NaN
      const auto given = [&](const void* x) { return x && !empty ? static_cast<const A*>(x)[row.out] : A(0); };
      const A g1 = given(g.first), g2 = given(g.second);
      t.peak[r] = empty ? A(0) : static_cast<A>(peak * LOG2E);
      t.c0[r] = given(g.mass) + g1;
      t.c1[r] = (g1 + 2 * g2) * ln2;
      t.c2[r] = g2 * ln2 * ln2;
      t.target[r] = given(g.target);
      if (call.need_key)
        convert_row<A>(p.query.data, p.query.offset[entry] + row.index * p.query.row, p.dtype, p.D, call.Dp,
                       *row_at<A>(p.scale, entry, row.index), t.query_rows + r * call.Dp);
      if (call.value) {
        A* up = t.up_rows + r * call.Vp;
        const A* moment = static_cast<const A*>(g.moment) + row.out * p.V;
        for (int64_t v = 0; v < call.Vp; ++v) up[v] = v < p.V && !empty ? moment[v] : A(0);
      }
    }
    t.span[i] = span_of(t.row + a, b - a);
    pack_queries<A>(call.sc, t.row + a, static_cast<int>(b - a), t.temp, t.query + i * p.D * L);
    if (call.value) pack_tile<A>(t.up_rows + a * call.Vp, b - a, p.V, call.Vp, t.up + i * p.V * L);
  }
}

template <class A>
bool flush(const A* from, int64_t keys, int64_t n, int64_t padded, A* to, bool fresh) {
  A probe = 0;
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t k = 0; k < n; ++k) {
      const A x = fresh ? from[j * padded + k] : to[j * n + k] + from[j * padded + k];
      to[j * n + k] = x;
      probe += x * 0;
    }
  return probe == 0;
}

template <class A>
bool run_patch(const BackCall<A>& call, const Patch& patch, Bench<A>& t) {
  constexpr int KEYS = BackBlock<A>::KEYS, P = Shape<A>::PANEL, R = Shape<A>::ROWS, TILES = BackBlock<A>::TILES;
  const PartitaProblem& p = call.p;
  const int64_t first_entry = call.plan.entry_begin[patch.group], members = call.plan.entry_begin[patch.group + 1] - first_entry;
  const int64_t entry = call.plan.entries[first_entry], total = members * (patch.row_end - patch.row);
  const int64_t bytes = static_cast<int64_t>(dtype_size(p.dtype));
  const Rows keys{static_cast<const char*>(p.key.data) + p.key.offset[entry] * bytes, p.key.row, p.dtype};
  Rows values;
  if (call.value) values = {static_cast<const char*>(p.value.data) + p.value.offset[entry] * bytes, p.value.row, p.dtype};
  const int64_t where = (patch.row_split * call.plan.groups + patch.group) * p.K;
  bool fine = true;
  for (int64_t at = 0; at == 0 || at < total; at += BackBlock<A>::CHUNK) {
    const int64_t n = total - at < BackBlock<A>::CHUNK ? total - at : BackBlock<A>::CHUNK, tiles = (n + R - 1) / R;
    pack_chunk(call, patch, at, n, tiles, t);
    Span seen;
    for (int64_t i = 0; i < tiles; ++i) seen.add(t.span[i]);
    for (int64_t key = patch.key_begin; key < patch.key_end; key += KEYS) {
      const int64_t end = key + KEYS < patch.key_end ? key + KEYS : patch.key_end, count = end - key;
      bool touched = false;
      if (seen.lo < end && seen.hi > key) {
        if (call.need_key) std::memset(t.grad_key, 0, sizeof(A) * static_cast<size_t>(count * call.Dp));
        if (call.need_value) std::memset(t.grad_value, 0, sizeof(A) * static_cast<size_t>(count * call.Vp));
        pack_panels<A>(keys, p.K, p.D, key / P, (end + P - 1) / P, t.key, t.temp);
        if (call.value) pack_panels<A>(values, p.K, p.V, key / P, (end + P - 1) / P, t.val, t.temp);
        const A* key_rows = reinterpret_cast<const A*>(keys.data) + key * keys.row;
        int64_t ldk = keys.row;
        if (call.need_query && !call.key_lies) {
          pack_rows<A>(keys, p.D, call.Dp, key, end, t.key_rows);
          key_rows = t.key_rows;
          ldk = call.Dp;
        }
        for (int64_t i = 0; i < tiles; i += TILES)
          fine &= meet<A>(call, t, patch, n, tiles, i, i + TILES < tiles ? i + TILES : tiles, key, end, key_rows, ldk, touched);
      }
      const auto deliver = [&](const A* from, int64_t width, int64_t padded, A* to) {
        if (touched)
          fine &= flush<A>(from, count, width, padded, to, at == 0);
        else if (at == 0)
          std::memset(to, 0, sizeof(A) * static_cast<size_t>(count * width));
      };
      if (call.need_key) deliver(t.grad_key, p.D, call.Dp, call.part_key + (where + key) * p.D);
      if (call.need_value) deliver(t.grad_value, p.V, call.Vp, call.part_value + (where + key) * p.V);
    }
  }
  return fine;
}

// sum over key splits, then dquery = scale * sum, dscale = <sum, query>, and the row sums of ds.
template <class A>
bool finish_row(const BackCall<A>& call, int64_t out, A* temp) {
  const PartitaProblem& p = call.p;
  const int64_t entry = out / p.Q, index = out % p.Q, rows = p.B * p.Q;
  A probe = 0;
  if (call.need_query) {
    A* sum = call.sum_key + out * call.Dp;
    for (int64_t s = 1; s < call.plan.key_splits; ++s) {
      const A* more = call.sum_key + (s * rows + out) * call.Dp;
      for (int64_t k = 0; k < p.D; ++k) sum[k] += more[k];
    }
    if (call.g.scale) {
      convert_row<A>(p.query.data, p.query.offset[entry] + index * p.query.row, p.dtype, p.D, p.D, A(1), temp);
      A dot = 0;
      for (int64_t k = 0; k < p.D; ++k) dot += sum[k] * temp[k];
      static_cast<A*>(call.g.scale)[out] = dot;
      probe += dot * 0;
    }
    if (call.g.query) {
      const A scale = *row_at<A>(p.scale, entry, index);
      A* to = static_cast<A*>(call.g.query) + out * p.D;
      for (int64_t k = 0; k < p.D; ++k) probe += (to[k] = scale * sum[k]) * 0;
    }
  }
  if (call.g.bias_row) {
    A sum = 0;
    for (int64_t s = 0; s < call.plan.key_splits; ++s) sum += call.sum_row[s * rows + out];
    static_cast<A*>(call.g.bias_row)[out] = sum;
    probe += sum * 0;
  }
  return probe == 0;
}

template <class A>
bool add_parts(const A* parts, int64_t splits, int64_t step, int64_t begin, int64_t end, A* to) {
  A probe = 0;
  for (int64_t i = begin; i < end; ++i) {
    A sum = parts[i];
    for (int64_t s = 1; s < splits; ++s) sum += parts[s * step + i];
    to[i] = sum;
    probe += sum * 0;
  }
  return probe == 0;
}

// Peak in base 2 and the coefficients of 1, c, c^2; an empty column has none.
template <class A>
void pack_columns(const PartitaGradients& g, int64_t K, int64_t padded, A* to) {
  const A ln2 = static_cast<A>(LN2);
  for (int64_t j = 0; j < padded; ++j) {
    const double peak = j < K ? static_cast<const double*>(g.col_peak)[j] : neg_inf<double>();
    const bool empty = peak == neg_inf<double>();
    const auto given = [&](const void* x) { return x && !empty ? static_cast<const A*>(x)[j] : A(0); };
    const A g1 = given(g.col_first), g2 = given(g.col_second);
    to[j] = empty ? A(0) : static_cast<A>(peak * LOG2E);
    to[padded + j] = given(g.col_mass) + g1;
    to[2 * padded + j] = (g1 + 2 * g2) * ln2;
    to[3 * padded + j] = g2 * ln2 * ln2;
  }
}

template <class A>
int32_t backward_as(const PartitaProblem& p, const BackwardPlan& plan, const PartitaGradients& g) {
  constexpr int W = Vec<A>::W;
  BackCall<A> call{p, plan, g, make_scores<A>(p), round_up(p.D, W), g.moment ? round_up(p.V, W) : 0, g.moment != nullptr,
                   g.first || g.second, g.query || g.scale, g.key != nullptr, g.value && g.moment, false,
                   nullptr, nullptr, nullptr, nullptr, nullptr, round_up(p.K, Shape<A>::PANEL)};
  const bool native_dtype = p.dtype == (sizeof(A) == 4 ? PARTITA_FLOAT32 : PARTITA_FLOAT64);
  call.key_lies = native_dtype && p.D % W == 0;
  const int64_t rows = p.B * p.Q, key_size = plan.groups * p.K * p.D, value_size = plan.groups * p.K * p.V;
  const bool in_place = plan.key_splits == 1 && p.D % W == 0 && g.query;  // the result holds the sums
  const bool split = plan.row_splits > 1;
  const auto carve = [&](Carver c) {
    call.sum_key = in_place ? static_cast<A*>(g.query) : c.take<A>(call.need_query ? plan.key_splits * rows * call.Dp : 0);
    call.column = g.col_peak ? c.take<A>(4 * call.padded) : nullptr;
    call.sum_row = c.take<A>(g.bias_row ? plan.key_splits * rows : 0);
    call.part_key = split ? c.take<A>(call.need_key ? plan.row_splits * key_size : 0) : static_cast<A*>(g.key);
    call.part_value = split ? c.take<A>(call.need_value ? plan.row_splits * value_size : 0) : static_cast<A*>(g.value);
    return c.used;
  };
  const Shared shared(carve(Carver{nullptr}) + 64);
  if (!shared.data) return NO_MEMORY;
  carve(Carver{static_cast<char*>(shared.data)});
  if (g.col_peak) pack_columns(g, p.K, call.padded, call.column);
  if (g.bias_row) std::memset(call.sum_row, 0, sizeof(A) * static_cast<size_t>(plan.key_splits * rows));
  int64_t longest = 0;
  for (int64_t i = 0; i < plan.begin[plan.lists]; ++i) {
    const Patch& patch = plan.patch[i];
    const int64_t members = plan.entry_begin[patch.group + 1] - plan.entry_begin[patch.group];
    const int64_t n = members * (patch.row_end - patch.row);
    longest = n > longest ? n : longest;
  }
  longest = longest < BackBlock<A>::CHUNK ? longest : BackBlock<A>::CHUNK;

  int32_t failed = 0, odd = 0;
#pragma omp parallel num_threads(p.threads) reduction(| : failed, odd)
  {
    FlushDenormals flush_denormals;
    Bench<A> t;
    Carver count{nullptr};
    t.carve(count, call, longest);
    Carver carver{static_cast<char*>(scratch(count.used + 64))};
    failed = !carver.base;
    if (carver.base) t.carve(carver, call, longest);
    constexpr int64_t STEP = 1 << 16;
    const int64_t sums = call.need_query ? plan.key_splits * rows * call.Dp : 0;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < sums; i += STEP)
      std::memset(call.sum_key + i, 0, sizeof(A) * static_cast<size_t>(sums - i < STEP ? sums - i : STEP));
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan.lists; ++i)
      for (int64_t j = plan.begin[i]; j < plan.begin[i + 1]; ++j)
        if (!failed) odd |= !run_patch<A>(call, plan.patch[j], t);
    const int64_t finished = call.need_query || g.bias_row ? rows : 0;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < finished; ++i)
      if (!failed) odd |= !finish_row<A>(call, i, t.temp);
    const int64_t key_parts = split && call.need_key ? key_size : 0, value_parts = split && call.need_value ? value_size : 0;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < key_parts; i += STEP)
      odd |= !add_parts<A>(call.part_key, plan.row_splits, key_size, i, i + STEP < key_size ? i + STEP : key_size, static_cast<A*>(g.key));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < value_parts; i += STEP)
      odd |= !add_parts<A>(call.part_value, plan.row_splits, value_size, i, i + STEP < value_size ? i + STEP : value_size,
                           static_cast<A*>(g.value));
  }
  return failed ? NO_MEMORY : odd ? NOT_FINITE : FINITE;
}

template <class A>
Tuning tuning_as(const PartitaProblem&) {
  return {BackBlock<A>::ROWS, BackBlock<A>::KEYS, 0, false};
}

}  // namespace

Tuning backward_tuning(const PartitaProblem& p) { return p.dtype == PARTITA_FLOAT64 ? tuning_as<double>(p) : tuning_as<float>(p); }

int32_t backward(const PartitaProblem& p, const BackwardPlan& plan, const PartitaGradients& g) {
  return p.dtype == PARTITA_FLOAT64 ? backward_as<double>(p, plan, g) : backward_as<float>(p, plan, g);
}

}  // namespace PARTITA_ISA
}  // namespace partita
