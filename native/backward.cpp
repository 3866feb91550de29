// Backward, the driver: chunks of rows, key blocks, partial sums added in a fixed order. The arithmetic is in
// backward.h.
#include "backward.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

// The upstream gradient of the moment of a row, padded; of an empty row it means nothing, and may be NaN.
template <class A>
inline void load_upstream(const PartitaGradients& g, const PartitaProblem& p, const Row& row, bool empty,
                          int64_t padded, A* to) {
  const A* moment = static_cast<const A*>(g.moment) + row.out * p.V;
  for (int64_t v = 0; v < padded; ++v) to[v] = v < p.V && !empty ? moment[v] : A(0);
}

// Rows [a, b) of a chunk, a tile, for the products over rows: queries times their scale, and upstream gradients; these
// packed for the product with the values too. As pairs the scale is left to the other factor.
template <class F>
void pack_row_major(const BackwardCall<F>& call, int64_t a, int64_t b, const bool* empty, BackwardWorkspace<F>& t,
                    F* up) {
  const PartitaProblem& p = call.p;
  const auto query_at = [&](const Row& row) { return p.query.offset[row.entry] + row.index * p.query.row; };
  if constexpr (Factor<F>::STEP > 1) {
    const uint16_t* query = static_cast<const uint16_t*>(p.query.data);
    const int64_t width = steps<F>(call.Vp);
    for (int64_t r = a; r < b; ++r) {
      if (call.need_key && r % 2 == 0)
        pair_rows(query + query_at(t.row[r]), r + 1 < b ? query + query_at(t.row[r + 1]) : nullptr, p.D, call.Dp,
                  t.query_rows + r / 2 * call.Dp);
      if (!call.value) continue;
      load_upstream(call.g, p, t.row[r], empty[r - a], call.Vp, t.temp);
      round_row<F>(t.temp, call.Vp, t.row_temp + (r - a) * width);
    }
    if (!call.value) return;
    const uint16_t* rounded = reinterpret_cast<const uint16_t*>(t.row_temp);
    for (int64_t r = a; r < b; r += 2)
      pair_rows(rounded + (r - a) * call.Vp, r + 1 < b ? rounded + (r + 1 - a) * call.Vp : nullptr, call.Vp, call.Vp,
                t.up_rows + r / 2 * call.Vp);
    pack_tile<F>({reinterpret_cast<const char*>(rounded), call.Vp, p.dtype}, 0, b - a, steps<F>(p.V) * 2, up, nullptr);
  }
  if constexpr (Factor<F>::STEP == 1) {
    for (int64_t r = a; r < b; ++r) {
      if (call.need_key)
        convert_row<F>(p.query.data, query_at(t.row[r]), p.dtype, p.D, call.Dp,
                       *row_at<F>(p.scale, t.row[r].entry, t.row[r].index), t.query_rows + r * call.Dp);
      if (call.value) load_upstream(call.g, p, t.row[r], empty[r - a], call.Vp, t.up_rows + r * call.Vp);
    }
    const RowView rows{reinterpret_cast<const char*>(t.up_rows), call.Vp, Factor<F>::DTYPE};
    if (call.value) pack_tile<F>(rows, a, b - a, p.V, up, nullptr);
  }
}

// Rows [at, at + n) of a task: the rows of its range, entry after entry.
template <class F>
void pack_chunk(const BackwardCall<F>& call, const BackwardTask& task, int64_t at, int64_t n, int64_t tiles,
                BackwardWorkspace<F>& t) {
  using A = Sum<F>;
  constexpr int L = Shape<F>::LANES;
  const PartitaProblem& p = call.p;
  const PartitaGradients& g = call.g;
  const A ln2 = static_cast<A>(LN2);
  const int64_t height = task.row_end - task.row;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t a = tile_row<F>(n, i, tiles), b = tile_row<F>(n, i + 1, tiles);
    bool unseeing[L];
    for (int64_t r = a; r < b; ++r) {
      const int64_t f = at + r, entry = call.plan.entries[call.plan.entry_begin[task.group] + f / height];
      const Row row = t.row[r] = make_row(p, entry, task.row + f % height);
      const double peak = static_cast<const double*>(g.peak)[row.out];
      const bool empty = unseeing[r - a] = peak == neg_inf<double>();  // its upstream gradients mean nothing
      const auto given = [&](const void* x) { return x && !empty ? static_cast<const A*>(x)[row.out] : A(0); };
      const A g1 = given(g.first), g2 = given(g.second);
      t.peak[r] = empty ? A(0) : static_cast<A>(peak * LOG2E);
      t.c0[r] = given(g.mass) + g1;
      t.c1[r] = (g1 + 2 * g2) * ln2;
      t.c2[r] = g2 * ln2 * ln2;
      t.target[r] = given(g.target);
      t.scale[r] = *row_at<A>(p.scale, entry, row.index);
    }
    pack_row_major<F>(call, a, b, unseeing, t, t.up + i * steps<F>(p.V) * L);
    pack_queries<F>(call.sc, t, i, a, b);
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

// The origin of row `at` of a task; n becomes the number of rows from there on that share it.
template <class F>
int64_t common_origin(const BackwardCall<F>& call, const BackwardTask& task, int64_t at, int64_t& n) {
  if (!call.plan.origin || n == 0) return 0;
  const int64_t height = task.row_end - task.row, Q = call.p.Q;
  const int64_t* entry = call.plan.entries + call.plan.entry_begin[task.group];
  const auto of = [&](int64_t f) { return call.plan.origin[entry[f / height] * Q + task.row + f % height]; };
  const int64_t origin = of(at);
  int64_t same = 1;
  while (same < n && of(at + same) == origin) ++same;
  n = same;
  return origin;
}

// The sums of a row over a segment of keys, added to those of the segments before it.
template <class F>
void add_segment(const BackwardCall<F>& call, int64_t out) {
  const int64_t rows = call.p.B * call.p.Q;
  const auto add = [&](Sum<F>* to, int64_t width) {
    Sum<F>*sum = to + out * width, *more = to + (rows + out) * width;
    for (int64_t k = 0; k < width; ++k) sum[k] += more[k], more[k] = 0;
  };
  if (call.need_query) add(call.sum_key, call.Dp);
  if (call.sum_scale) add(call.sum_scale, 1);
  if (call.g.bias_row) add(call.sum_row, 1);
}

template <class F>
bool run_backward_task(const BackwardCall<F>& call, const BackwardTask& task, BackwardWorkspace<F>& t) {
  using A = Sum<F>;
  constexpr int KEYS = BackwardBlock<F>::KEYS, P = Shape<F>::PANEL, R = Shape<F>::ROWS, TILES = BackwardBlock<F>::TILES;
  const PartitaProblem& p = call.p;
  const int64_t first_entry = call.plan.entry_begin[task.group],
                members = call.plan.entry_begin[task.group + 1] - first_entry;
  const int64_t entry = call.plan.entries[first_entry], total = members * (task.row_end - task.row);
  const RowView keys = view_of(p.key, p.dtype, entry),
                values = call.value ? view_of(p.value, p.dtype, entry) : RowView{};
  const int64_t where = (task.row_split * call.plan.groups + task.group) * p.K;
  bool fine = true;
  const bool moved = call.plan.origin || call.plan.in_turn;  // key blocks of chunks may overlap, or have been seen
  if (moved && task.key_split == 0) {
    if (call.need_key) std::memset(call.part_key + where * p.D, 0, sizeof(A) * static_cast<size_t>(p.K * p.D));
    if (call.need_value) std::memset(call.part_value + where * p.V, 0, sizeof(A) * static_cast<size_t>(p.K * p.V));
  }
  for (int64_t at = 0, n; at == 0 || at < total; at += n ? n : 1) {
    n = total - at < BackwardBlock<F>::CHUNK ? total - at : BackwardBlock<F>::CHUNK;
    const int64_t origin = common_origin(call, task, at, n), tiles = (n + R - 1) / R;
    const int64_t last = origin + task.key_end < p.K ? origin + task.key_end : p.K;
    pack_chunk(call, task, at, n, tiles, t);
    KeySpan seen;
    for (int64_t i = 0; i < tiles; ++i) seen.add(t.span[i]);
    for (int64_t key = origin + task.key_begin; key < last; key += KEYS) {
      const int64_t end = key + KEYS < last ? key + KEYS : last, count = end - key;
      bool touched = false;
      if (seen.lo < end && seen.hi > key) {
        if (call.need_key) std::memset(t.grad_key, 0, sizeof(A) * static_cast<size_t>(count * call.Dp));
        if (call.need_value) std::memset(t.grad_value, 0, sizeof(A) * static_cast<size_t>(count * call.Vp));
        const int64_t panels = (count + P - 1) / P;
        pack_panels<F>(rows_from(keys, key), p.K - key, p.D, 0, panels, t.key, t.row_temp);
        if (call.value) pack_panels<F>(rows_from(values, key), p.K - key, p.V, 0, panels, t.val, t.row_temp);
        BackwardKeys<F> block{key, end, reinterpret_cast<const F*>(keys.data) + key * keys.row, keys.row};
        if (call.need_query && !call.key_lies) {
          pack_rows<F>(keys, p.D, call.Dp, key, end, t.key_rows);
          block.rows = t.key_rows;
          block.stride = call.Dp;
        }
        for (int64_t i = 0; i < tiles; i += TILES)
          fine &= backward_block<F>(call, t, call.plan.in_turn ? task.key_split > 0 : task.key_split,
                                    {n, tiles, i, i + TILES < tiles ? i + TILES : tiles}, block, touched);
      }
      const auto store = [&](const A* from, int64_t width, int64_t padded, A* to) {
        if (touched)
          fine &= store_gradient<A>(from, count, width, padded, to, at == 0 && !moved);
        else if (at == 0 && !moved)
          std::memset(to, 0, sizeof(A) * static_cast<size_t>(count * width));
      };
      if (call.need_key) store(t.grad_key, p.D, call.Dp, call.part_key + (where + key) * p.D);
      if (call.need_value) store(t.grad_value, p.V, call.Vp, call.part_value + (where + key) * p.V);
    }
  }
  if (call.plan.in_turn && task.key_split > 0)
    for (int64_t f = 0; f < total; ++f) {
      const int64_t member = call.plan.entries[first_entry + f / (task.row_end - task.row)];
      add_segment(call, member * p.Q + task.row + f % (task.row_end - task.row));
    }
  return fine;
}

// sum over key splits, then dquery = scale * sum, dscale = <sum, query>, and the row sums of ds.
template <class F>
bool finish_query_row(const BackwardCall<F>& call, int64_t out, Sum<F>* temp) {
  using A = Sum<F>;
  const PartitaProblem& p = call.p;
  const int64_t entry = out / p.Q, index = out % p.Q, rows = p.B * p.Q;
  A probe = 0;
  const auto store = [&](void* to, A x) {
    static_cast<A*>(to)[out] = x;
    probe += x * 0;
  };
  const auto total = [&](const A* sums) {
    A sum = 0;
    for (int64_t s = 0; s < call.plan.key_splits; ++s) sum += sums[s * rows + out];
    return sum;
  };
  if (call.need_query) {
    A* sum = call.sum_key + out * call.Dp;
    for (int64_t s = 1; s < call.plan.key_splits; ++s) {
      const A* more = call.sum_key + (s * rows + out) * call.Dp;
      for (int64_t k = 0; k < p.D; ++k) sum[k] += more[k];
    }
    if (call.g.scale && !call.sum_scale) {
      convert_row<A>(p.query.data, p.query.offset[entry] + index * p.query.row, p.dtype, p.D, p.D, A(1), temp);
      A dot = 0;
      for (int64_t k = 0; k < p.D; ++k) dot += sum[k] * temp[k];
      store(call.g.scale, dot);
    }
    if (call.g.query) {
      const A scale = *row_at<A>(p.scale, entry, index);
      A* to = static_cast<A*>(call.g.query) + out * p.D;
      for (int64_t k = 0; k < p.D; ++k) probe += (to[k] = scale * sum[k]) * 0;
    }
  }
  if (call.sum_scale) store(call.g.scale, total(call.sum_scale));
  if (call.g.bias_row) store(call.g.bias_row, total(call.sum_row));
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
template <class F>
int32_t backward_as(const PartitaProblem& p, const BackwardPlan& plan, const PartitaGradients& g) {
  using A = Sum<F>;
  constexpr int W = Vec<A>::W;
  constexpr bool PAIRS = Factor<F>::STEP > 1;
  BackwardCall<F> call{p,
                       plan,
                       g,
                       make_score_rule<A>(p),
                       round_up(p.D, W),
                       g.moment ? round_up(p.V, W) : 0,
                       g.moment != nullptr,
                       g.first || g.second,
                       g.query || (g.scale && !PAIRS),
                       g.key != nullptr,
                       g.value && g.moment,
                       false,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr,
                       round_up(p.K, Shape<F>::PANEL)};
  call.key_lies = p.dtype == Factor<A>::DTYPE && p.D % W == 0;
  const int64_t rows = p.B * p.Q, key_size = plan.groups * p.K * p.D, value_size = plan.groups * p.K * p.V;
  const int64_t sums_of_keys = plan.in_turn ? 2 : plan.key_splits;
  const bool in_place = sums_of_keys == 1 && p.D % W == 0 && g.query;  // the result holds the sums
  const bool split = plan.row_splits > 1;
  const auto lay_out = [&](Arena c) {
    call.sum_key = in_place ? static_cast<A*>(g.query) : c.take<A>(call.need_query ? sums_of_keys * rows * call.Dp : 0);
    call.column = g.col_peak ? c.take<A>(2 * call.padded) : nullptr;
    call.sum_row = c.take<A>(g.bias_row ? sums_of_keys * rows : 0);
    call.sum_scale = PAIRS && g.scale ? c.take<A>(sums_of_keys * rows) : nullptr;
    call.part_key = split ? c.take<A>(call.need_key ? plan.row_splits * key_size : 0) : static_cast<A*>(g.key);
    call.part_value = split ? c.take<A>(call.need_value ? plan.row_splits * value_size : 0) : static_cast<A*>(g.value);
    return c.used;
  };
  const SharedWorkspace shared(lay_out(Arena{nullptr}) + 64);
  if (!shared.data) return NO_MEMORY;
  lay_out(Arena{static_cast<char*>(shared.data)});
  if (g.col_peak) pack_columns(g, p.K, call.padded, call.column);
  if (g.bias_row) std::memset(call.sum_row, 0, sizeof(A) * static_cast<size_t>(sums_of_keys * rows));
  if (call.sum_scale) std::memset(call.sum_scale, 0, sizeof(A) * static_cast<size_t>(sums_of_keys * rows));
  int64_t longest = 0;
  for (int64_t i = 0; i < plan.begin[plan.lists]; ++i) {
    const BackwardTask& task = plan.task[i];
    const int64_t members = plan.entry_begin[task.group + 1] - plan.entry_begin[task.group];
    const int64_t n = members * (task.row_end - task.row);
    longest = n > longest ? n : longest;
  }
  longest = longest < BackwardBlock<F>::CHUNK ? longest : BackwardBlock<F>::CHUNK;

  int32_t failed = 0, not_finite = 0;
#pragma omp parallel num_threads(static_cast<int>(plan.threads)) reduction(| : failed, not_finite)
  {
    FlushDenormals flush_denormals;
    BackwardWorkspace<F> t;
    Arena count{nullptr};
    t.lay_out(count, call, longest);
    Arena arena{static_cast<char*>(thread_workspace(count.used + 64))};
    failed = !arena.base;
    if (arena.base) t.lay_out(arena, call, longest);
    for (int r = 0; arena.base && r < Shape<F>::ROWS; ++r) t.ones[r] = 1;
    constexpr int64_t STEP = 1 << 16;
    const int64_t sums = call.need_query ? sums_of_keys * rows * call.Dp : 0;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < sums; i += STEP)
      std::memset(call.sum_key + i, 0, sizeof(A) * static_cast<size_t>(sums - i < STEP ? sums - i : STEP));
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan.lists; ++i)
      for (int64_t j = plan.begin[i]; j < plan.begin[i + 1]; ++j)
        if (!failed) not_finite |= !run_backward_task<F>(call, plan.task[j], t);
    const int64_t finished = call.need_query || call.sum_scale || g.bias_row ? rows : 0;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < finished; ++i)
      if (!failed) not_finite |= !finish_query_row<F>(call, i, t.temp);
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

template <class F>
Tuning tuning_as() {
  return {BackwardBlock<F>::ROWS, BackwardBlock<F>::KEYS, 0, false};
}

}  // namespace

Tuning backward_tuning(const PartitaProblem& p) {
  return with_factors(p.dtype, [](auto f) { return tuning_as<decltype(f)>(); });
}

int32_t backward(const PartitaProblem& p, const BackwardPlan& plan, const PartitaGradients& g) {
  return with_factors(p.dtype, [&](auto f) { return backward_as<decltype(f)>(p, plan, g); });
}

}  // namespace PARTITA_ISA
}  // namespace partita
