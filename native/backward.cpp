// Backward, the driver: chunks of rows, key blocks, partial sums added in a fixed order. The arithmetic is in
// backward.h.
#include "backward.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

// Rows [at, at + n) of a task: the rows of its range, entry after entry.
template <class A>
void pack_chunk(const BackwardCall<A>& call, const BackwardTask& task, int64_t at, int64_t n, int64_t tiles,
                BackwardWorkspace<A>& t) {
  constexpr int L = Shape<A>::LANES;
  const PartitaProblem& p = call.p;
  const PartitaGradients& g = call.g;
  const A ln2 = static_cast<A>(LN2);
  const int64_t height = task.row_end - task.row;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t a = n * i / tiles, b = n * (i + 1) / tiles;
    for (int64_t r = a; r < b; ++r) {
      const int64_t f = at + r, entry = call.plan.entries[call.plan.entry_begin[task.group] + f / height];
      const Row row = t.row[r] = make_row(p, entry, task.row + f % height);
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
    t.span[i] = key_span(t.row + a, b - a);
    pack_queries<A>(call.sc, t.row + a, static_cast<int>(b - a), t.temp, t.query + i * p.D * L);
    if (call.value) pack_tile<A>(t.up_rows + a * call.Vp, b - a, p.V, call.Vp, t.up + i * p.V * L);
  }
}

template <class A>
bool store_gradient(const A* from, int64_t keys, int64_t n, int64_t padded, A* to, bool fresh) {
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
bool run_backward_task(const BackwardCall<A>& call, const BackwardTask& task, BackwardWorkspace<A>& t) {
  constexpr int KEYS = BackwardBlock<A>::KEYS, P = Shape<A>::PANEL, R = Shape<A>::ROWS, TILES = BackwardBlock<A>::TILES;
  const PartitaProblem& p = call.p;
  const int64_t first_entry = call.plan.entry_begin[task.group],
                members = call.plan.entry_begin[task.group + 1] - first_entry;
  const int64_t entry = call.plan.entries[first_entry], total = members * (task.row_end - task.row);
  const int64_t bytes = static_cast<int64_t>(dtype_size(p.dtype));
  const RowView keys{static_cast<const char*>(p.key.data) + p.key.offset[entry] * bytes, p.key.row, p.dtype};
  RowView values;
  if (call.value)
    values = {static_cast<const char*>(p.value.data) + p.value.offset[entry] * bytes, p.value.row, p.dtype};
  const int64_t where = (task.row_split * call.plan.groups + task.group) * p.K;
  bool fine = true;
  for (int64_t at = 0; at == 0 || at < total; at += BackwardBlock<A>::CHUNK) {
    const int64_t n = total - at < BackwardBlock<A>::CHUNK ? total - at : BackwardBlock<A>::CHUNK,
                  tiles = (n + R - 1) / R;
    pack_chunk(call, task, at, n, tiles, t);
    KeySpan seen;
    for (int64_t i = 0; i < tiles; ++i) seen.add(t.span[i]);
    for (int64_t key = task.key_begin; key < task.key_end; key += KEYS) {
      const int64_t end = key + KEYS < task.key_end ? key + KEYS : task.key_end, count = end - key;
      bool touched = false;
      if (seen.lo < end && seen.hi > key) {
        if (call.need_key) std::memset(t.grad_key, 0, sizeof(A) * static_cast<size_t>(count * call.Dp));
        if (call.need_value) std::memset(t.grad_value, 0, sizeof(A) * static_cast<size_t>(count * call.Vp));
        pack_panels<A>(keys, p.K, p.D, key / P, (end + P - 1) / P, t.key, t.temp);
        if (call.value) pack_panels<A>(values, p.K, p.V, key / P, (end + P - 1) / P, t.val, t.temp);
        BackwardKeys<A> block{key, end, reinterpret_cast<const A*>(keys.data) + key * keys.row, keys.row};
        if (call.need_query && !call.key_lies) {
          pack_rows<A>(keys, p.D, call.Dp, key, end, t.key_rows);
          block.rows = t.key_rows;
          block.stride = call.Dp;
        }
        for (int64_t i = 0; i < tiles; i += TILES)
          fine &= backward_block<A>(call, t, task.key_split, {n, tiles, i, i + TILES < tiles ? i + TILES : tiles},
                                    block, touched);
      }
      const auto store = [&](const A* from, int64_t width, int64_t padded, A* to) {
        if (touched)
          fine &= store_gradient<A>(from, count, width, padded, to, at == 0);
        else if (at == 0)
          std::memset(to, 0, sizeof(A) * static_cast<size_t>(count * width));
      };
      if (call.need_key) store(t.grad_key, p.D, call.Dp, call.part_key + (where + key) * p.D);
      if (call.need_value) store(t.grad_value, p.V, call.Vp, call.part_value + (where + key) * p.V);
    }
  }
  return fine;
}

// sum over key splits, then dquery = scale * sum, dscale = <sum, query>, and the row sums of ds.
template <class A>
bool finish_query_row(const BackwardCall<A>& call, int64_t out, A* temp) {
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

// Peak in base 2 and upstream gradient of each column; an empty one has none.
template <class A>
void pack_columns(const PartitaGradients& g, int64_t K, int64_t padded, A* to) {
  for (int64_t j = 0; j < padded; ++j) {
    const double peak = j < K ? static_cast<const double*>(g.col_peak)[j] : neg_inf<double>();
    const bool empty = peak == neg_inf<double>();
    to[j] = empty ? A(0) : static_cast<A>(peak * LOG2E);
    to[padded + j] = g.col_mass && !empty ? static_cast<const A*>(g.col_mass)[j] : A(0);
  }
}

// Long, because it is one parallel region: what each thread works in is laid out before it, and its loops share that.
template <class A>
int32_t backward_as(const PartitaProblem& p, const BackwardPlan& plan, const PartitaGradients& g) {
  constexpr int W = Vec<A>::W;
  BackwardCall<A> call{p,
                       plan,
                       g,
                       make_score_rule<A>(p),
                       round_up(p.D, W),
                       g.moment ? round_up(p.V, W) : 0,
                       g.moment != nullptr,
                       g.first || g.second,
                       g.query || g.scale,
                       g.key != nullptr,
                       g.value && g.moment,
                       false,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr,
                       round_up(p.K, Shape<A>::PANEL)};
  const bool same_dtype = p.dtype == (sizeof(A) == 4 ? PARTITA_FLOAT32 : PARTITA_FLOAT64);
  call.key_lies = same_dtype && p.D % W == 0;
  const int64_t rows = p.B * p.Q, key_size = plan.groups * p.K * p.D, value_size = plan.groups * p.K * p.V;
  const bool in_place = plan.key_splits == 1 && p.D % W == 0 && g.query;  // the result holds the sums
  const bool split = plan.row_splits > 1;
  const auto lay_out = [&](Arena c) {
    call.sum_key =
        in_place ? static_cast<A*>(g.query) : c.take<A>(call.need_query ? plan.key_splits * rows * call.Dp : 0);
    call.column = g.col_peak ? c.take<A>(2 * call.padded) : nullptr;
    call.sum_row = c.take<A>(g.bias_row ? plan.key_splits * rows : 0);
    call.part_key = split ? c.take<A>(call.need_key ? plan.row_splits * key_size : 0) : static_cast<A*>(g.key);
    call.part_value = split ? c.take<A>(call.need_value ? plan.row_splits * value_size : 0) : static_cast<A*>(g.value);
    return c.used;
  };
  const SharedWorkspace shared(lay_out(Arena{nullptr}) + 64);
  if (!shared.data) return NO_MEMORY;
  lay_out(Arena{static_cast<char*>(shared.data)});
  if (g.col_peak) pack_columns(g, p.K, call.padded, call.column);
  if (g.bias_row) std::memset(call.sum_row, 0, sizeof(A) * static_cast<size_t>(plan.key_splits * rows));
  int64_t longest = 0;
  for (int64_t i = 0; i < plan.begin[plan.lists]; ++i) {
    const BackwardTask& task = plan.task[i];
    const int64_t members = plan.entry_begin[task.group + 1] - plan.entry_begin[task.group];
    const int64_t n = members * (task.row_end - task.row);
    longest = n > longest ? n : longest;
  }
  longest = longest < BackwardBlock<A>::CHUNK ? longest : BackwardBlock<A>::CHUNK;

  int32_t failed = 0, not_finite = 0;
#pragma omp parallel num_threads(static_cast<int>(plan.threads)) reduction(| : failed, not_finite)
  {
    FlushDenormals flush_denormals;
    BackwardWorkspace<A> t;
    Arena count{nullptr};
    t.lay_out(count, call, longest);
    Arena arena{static_cast<char*>(thread_workspace(count.used + 64))};
    failed = !arena.base;
    if (arena.base) t.lay_out(arena, call, longest);
    constexpr int64_t STEP = 1 << 16;
    const int64_t sums = call.need_query ? plan.key_splits * rows * call.Dp : 0;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < sums; i += STEP)
      std::memset(call.sum_key + i, 0, sizeof(A) * static_cast<size_t>(sums - i < STEP ? sums - i : STEP));
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan.lists; ++i)
      for (int64_t j = plan.begin[i]; j < plan.begin[i + 1]; ++j)
        if (!failed) not_finite |= !run_backward_task<A>(call, plan.task[j], t);
    const int64_t finished = call.need_query || g.bias_row ? rows : 0;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < finished; ++i)
      if (!failed) not_finite |= !finish_query_row<A>(call, i, t.temp);
    const int64_t key_parts = split && call.need_key ? key_size : 0,
                  value_parts = split && call.need_value ? value_size : 0;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < key_parts; i += STEP)
      not_finite |= !add_parts<A>(call.part_key, plan.row_splits, key_size, i,
                                  i + STEP < key_size ? i + STEP : key_size, static_cast<A*>(g.key));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < value_parts; i += STEP)
      not_finite |= !add_parts<A>(call.part_value, plan.row_splits, value_size, i,
                                  i + STEP < value_size ? i + STEP : value_size, static_cast<A*>(g.value));
  }
  return failed ? NO_MEMORY : not_finite ? NOT_FINITE : FINITE;
}

template <class A>
Tuning tuning_as(const PartitaProblem&) {
  return {BackwardBlock<A>::ROWS, BackwardBlock<A>::KEYS, 0, false};
}

}  // namespace

Tuning backward_tuning(const PartitaProblem& p) {
  return p.dtype == PARTITA_FLOAT64 ? tuning_as<double>(p) : tuning_as<float>(p);
}

int32_t backward(const PartitaProblem& p, const BackwardPlan& plan, const PartitaGradients& g) {
  return p.dtype == PARTITA_FLOAT64 ? backward_as<double>(p, plan, g) : backward_as<float>(p, plan, g);
}

}  // namespace PARTITA_ISA
}  // namespace partita
