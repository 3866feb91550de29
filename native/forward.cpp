// Forward: the sums of each row over its visible keys, relative to the row's peak.
//
// A task is a block of rows against a range of keys. Key blocks are the outer loop (a block stays in L2), register
// tiles of rows the inner one (their scores stay in L1): product, softcap/bias/mask, then peak, exponentials and their
// sums (online_softmax.h), then the product with the values. Ranges of keys are merged in a fixed order.
#include "column_sums.h"
#include "decode.h"
#include "epilogue.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

constexpr int64_t PARTIAL = 5, COUNTS = 3;  // numbers of an unfinished row before its moment, and whole ones

template <class F>
struct ForwardCall {
  using A = Sum<F>;
  const PartitaProblem& p;
  const Plan& plan;
  const PartitaSums& to;
  ScoreRule<A> sc;
  int64_t depth, Vp, panels;  // depth: steps of a query and key
  bool moments, rank, pack_value, decode;
  bool few = false;        // rows, exact: a panel of keys is packed, used and forgotten
  bool first_key = false;  // its score is wanted
  bool rounded = false;    // weights and values are multiplied in pairs: for a mean, which is rounded itself
  int64_t step = 1;        // values of a packed row: two of pairs
  F* packed = nullptr;     // of the wave: for each group its key panels, then its padded values
  int64_t packed_group = 0;
  A* partial = nullptr;              // peak, mass, first, second, target, moment of each unfinished row
  int64_t* partial_count = nullptr;  // count, rank and argmax
  A* columns = nullptr;              // of each row block

  RowView keys(int64_t group) const { return view_of(p.key, p.dtype, plan.entries[plan.begin[group]]); }
  RowView values(int64_t group) const { return view_of(p.value, p.dtype, plan.entries[plan.begin[group]]); }
};

// The score of one row's target with the roundings of the tile, so that a copy of the target's key ties with it.
template <class F>
inline Sum<F> target_score(const ScoreRule<Sum<F>>& sc, const Row& row, const RowView& keys, const F* query,
                           int64_t step, const Sum<F>* factor, F* temp) {
  using A = Sum<F>;
  using V = Vec<A>;
  const PartitaProblem& p = *sc.problem;
  const int64_t j = row.target;
  if (j < 0 || j >= p.K || !visible(p, row, j)) return neg_inf<A>();
  const F* key = row_steps<F>(keys, j, p.D, temp);
  const int64_t depth = steps<F>(p.D);
  typename V::T total = V::set(0);
  for (int64_t k = 0; k < depth; k += CHAIN) {
    typename V::T acc = V::set(0);
    for (int64_t i = k; i < depth && i < k + CHAIN; ++i)
      acc = Vec<F>::fma(Vec<F>::set(query[i * step]), Vec<F>::set(key[i]), acc);
    total = k ? V::add(total, acc) : acc;
  }
  total = scaled<F>(total, factor);
  alignas(64) A s[16], bias[16];
  V::store(s, total);
  const ColumnRange runs[2] = {{0, V::W}, {V::W, V::W}};
  VisibleColumns c;
  c.runs = 1;
  c.end = V::W;
  c.whole = true;
  bias_and_mask<A, Vec<A>::W>(sc, &row, 1, j, c, runs, s, bias, nullptr);
  return s[0];
}

template <class F>
void start_rows(const ForwardCall<F>& call, const Task& task, RowStates<F>& t, int64_t tiles) {
  using A = Sum<F>;
  constexpr int W = Vec<A>::W, L = Shape<F>::LANES;
  const PartitaProblem& p = call.p;
  const int64_t* entry = call.plan.entries + call.plan.begin[task.group] + task.first / p.Q;
  for (int64_t r = 0, index = task.first % p.Q; r < task.rows; ++r, ++index) {
    if (index == p.Q) ++entry, index = 0;
    t.row[r] = make_row(p, *entry, index);
    t.peak[r] = t.reference[r] = t.base[r] = neg_inf<A>();
    t.centre[r] = 0;
    t.count[r] = t.rank[r] = 0;
    t.argmax[r] = -1;
    t.target[r] = neg_inf<A>();
  }
  const size_t lanes = sizeof(A) * static_cast<size_t>(task.rows * W);
  std::memset(t.mass, 0, lanes);
  std::memset(t.first, 0, lanes);
  std::memset(t.second, 0, lanes);
  if (call.to.moment) std::memset(t.moment, 0, sizeof(A) * static_cast<size_t>(task.rows * call.Vp));
  if (call.to.moment && Factor<F>::STEP > 1) std::memset(t.rounded, 0, lanes);
  const RowView keys = p.K ? call.keys(task.group) : RowView{};
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t a = task.rows * i / tiles, b = task.rows * (i + 1) / tiles;
    pack_queries<F>(call.sc, t, i, a, b);
    const F* query = t.query + i * call.depth * L;
    if (p.target.data)
      for (int64_t r = a; r < b; ++r)
        t.target[r] = target_score<F>(call.sc, t.row[r], keys, query + (r - a), L, t.factor + r, t.row_temp);
  }
}

template <class F>
bool epilogue(const ForwardCall<F>& call, const Task& task, const RowStates<F>& t) {
  using A = Sum<F>;
  using V = Vec<A>;
  const PartitaProblem& p = call.p;
  const bool counted = call.sc.masked || p.bias.data;
  bool fine = true;
  RowTotals<A> sum;
  RowExtras<A> extras{};
  for (int64_t first = 0; first < task.rows; first += V::W) {
    const int n = static_cast<int>(task.rows - first < V::W ? task.rows - first : V::W);
    sum_lanes<F>(t, first, task.rows, call.moments, call.rounded, call.to.mean, sum);
    for (int i = 0; i < n; ++i) {
      const int64_t r = first + i;
      const Row& row = t.row[r];
      const int64_t lo = row.start > task.key_begin ? row.start : task.key_begin,
                    hi = row.stop < task.key_end ? row.stop : task.key_end,
                    seen = hi > lo ? hi - lo - (row.skip >= lo && row.skip < hi) : 0;
      extras.count[i] = counted ? t.count[r] : seen;
      extras.rank[i] = t.rank[r];
      extras.argmax[i] = t.argmax[r];
      extras.target[i] = t.target[r];
    }
    if (task.partial < 0) {
      fine &= write_rows<A>(p, call.to, t.row + first, n, sum, extras, t.moment + first * call.Vp, call.Vp);
      continue;
    }
    for (int i = 0; i < n; ++i) {
      const int64_t r = first + i;
      A* part = call.partial + (task.partial + r) * (PARTIAL + call.Vp);
      part[0] = sum.peak[i];
      part[1] = sum.mass[i];
      part[2] = sum.first[i];
      part[3] = sum.spread[i];
      part[4] = extras.target[i];
      for (int64_t v = 0; v < call.Vp; ++v) part[PARTIAL + v] = sum.ratio[i] * t.moment[r * call.Vp + v];
      int64_t* counts = call.partial_count + (task.partial + r) * COUNTS;
      counts[0] = extras.count[i];
      counts[1] = extras.rank[i];
      counts[2] = extras.argmax[i];
    }
  }
  return fine;
}

// Asks the cache for a share (`part` of `parts`) of what a later task reads first, while this one computes: heads of a
// short sequence are otherwise waited for, one after the other.
template <class F>
void prefetch_task(const ForwardCall<F>& call, const Task* task, int64_t part, int64_t parts) {
  if (!task) return;
  const PartitaProblem& p = call.p;
  const int64_t size = static_cast<int64_t>(dtype_size(p.dtype)),
                entry = call.plan.entries[call.plan.begin[task->group] + task->first / p.Q];
  const auto rows = [&](const PartitaOperand& o, int64_t first, int64_t n, int64_t width) {
    if (!o.data) return;
    for (int64_t r = n * part / parts; r < n * (part + 1) / parts; ++r) {
      const char* at = static_cast<const char*>(o.data) + (o.offset[entry] + (first + r) * o.row) * size;
      for (int64_t k = 0; k < width * size; k += 64) __builtin_prefetch(at + k, 0, 2);
    }
  };
  rows(p.key, 0, p.K, p.D);
  rows(p.query, task->first % p.Q, task->rows < p.Q ? task->rows : p.Q, p.D);
  if (call.to.moment) rows(p.value, 0, p.K, p.V);
}

// Key panels and values of one key block, packed or in place.
template <class F>
struct KeyBlock {
  int64_t begin, end;    // keys
  const F* panels;       // null for the decode kernel, which reads keys in place
  const void* value;     // of F or, where weights are not rounded, of the sums; null where no moment is wanted
  int64_t value_stride;  // from one step of values to the next
};

// Values of keys [first, last) of a group as the product with the weights takes them.
template <class F>
void pack_values(const ForwardCall<F>& call, const RowView& from, int64_t first, int64_t last, F* to) {
  if (call.rounded)
    pack_rows<F>(from, call.p.V, call.Vp, first, last, to);
  else
    pack_rows<Sum<F>>(from, call.p.V, call.Vp, first, last, reinterpret_cast<Sum<F>*>(to));
}

template <class F>
KeyBlock<F> load_key_block(const ForwardCall<F>& call, const Task& task, int64_t key, int64_t hi, const F* packed,
                           RowStates<F>& t) {
  constexpr int KEYS = Block<Sum<F>>::KEYS, P = Shape<F>::PANEL;
  const PartitaProblem& p = call.p;
  KeyBlock<F> block{key, key + KEYS < p.K ? key + KEYS : p.K, packed + key * call.depth, nullptr, call.Vp};
  const int64_t used = block.end < hi ? block.end : hi;
  if (!call.plan.prepacked && !call.decode && !call.few) {
    pack_panels<F>(rows_from(call.keys(task.group), key), p.K - key, p.D, 0, (used - key + P - 1) / P, t.panel,
                   t.row_temp);
    block.panels = t.panel;
  }
  if (!call.to.moment) return block;
  const RowView values = call.values(task.group);
  if (!call.pack_value) {
    block.value = reinterpret_cast<const F*>(values.data) + key * values.row;
    block.value_stride = values.row;
  } else if (call.plan.prepacked) {
    block.value = packed + call.panels * P * call.depth + key / call.step * call.Vp;
  } else {
    pack_values(call, values, key, used, t.value);
    block.value = t.value;
  }
  return block;
}

// One register tile (rows [at, at + m) of the task, number i) against one key block: scores, online softmax, moments.
template <class F>
void run_tile(const ForwardCall<F>& call, const Task& task, RowStates<F>& t, int64_t i, int64_t at, int m,
              const KeyBlock<F>& block, const Sum<F>* decode_rows, const ColumnSums<Sum<F>>& columns) {
  using A = Sum<F>;
  constexpr int P = Shape<F>::PANEL, LD = Block<A>::LD, L = Shape<F>::LANES;
  const PartitaProblem& p = call.p;
  const int64_t key = block.begin;
  ColumnRange runs[Block<A>::RUNS];
  const VisibleColumns c = visible_columns<A>(p, call.sc.masked, t.span[i], t.row + at, m, key, block.end, runs);
  if (!c.runs) return;
  const auto find_scores = [&] {
    for (int u = 0; u < c.runs; ++u) {
      const ColumnRange run = runs[u];
      if (call.few)
        for (int j = run.begin; j < run.end; j += P) {
          pack_panels<F>(rows_from(call.keys(task.group), key + j), p.K - key - j, p.D, 0, 1, t.panel, t.row_temp);
          score<F, LD>(m, call.depth, t.query + i * call.depth * L, t.panel, 1, t.score + j, t.factor + at);
        }
      else if (call.decode)
        for (int r = 0; r < m; ++r)
          decode_scores<A>(decode_rows + r * DECODE_DIM, p.D, call.keys(task.group), key + run.begin,
                           run.end - run.begin, p.K, t.score + r * LD + run.begin);
      else
        score<F, LD>(m, call.depth, t.query + i * call.depth * L, block.panels + run.begin * call.depth,
                     (run.end - run.begin) / P, t.score + run.begin, t.factor + at);
    }
    if (!call.sc.plain || !c.whole)
      bias_and_mask<A, LD>(call.sc, t.row + at, m, key, c, runs, t.score, t.temp, nullptr);
  };
  find_scores();
  if (call.first_key && key == 0 && c.begin == 0)
    for (int r = 0; r < m; ++r) t.target[at + r] = t.score[r * LD];
  if (call.to.col_peak) add_to_columns<A, LD>(t.score, m, c.begin, c.end, key, columns);
  if (call.to.argmax) update_best<F>(t, at, m, c, key);
  alignas(64) A keep[L];
  const auto weigh = [&](auto e) {
    using E = decltype(e);
    const uint32_t cancelled = online_softmax<E>(call.sc, t, at, m, c, call.moments, call.rank, keep);
    const E *weights = reinterpret_cast<const E*>(t.score), *values = static_cast<const E*>(block.value);
    const int64_t ldv = block.value_stride;
    // Which panels are hidden is known of the rows together: exact sums run over those too, whose weights are 0.
    const int cuts = p.exact ? 1 : c.runs;
    for (int u = 0; values && u < cuts; ++u) {
      const int64_t begin = runs[u].begin, end = p.exact ? c.end : runs[u].end,
                    n = (end < c.last ? end : c.last) - begin;
      const E* value = values + begin / Factor<E>::STEP * ldv;
      if constexpr (Factor<E>::STEP == 1)
        if (call.few) {
          for (int r = 0; r < m; ++r)
            accumulate_in_order<E>(n, weights + r * LD + begin, value, ldv, call.Vp, t.moment + (at + r) * call.Vp,
                                   keep[r]);
          continue;
        }
      if constexpr (Factor<F>::STEP == 1)
        if (call.decode) {
          for (int r = 0; r < m; ++r)
            decode_accumulate<A>(n, t.score + r * LD + begin, value, ldv, call.Vp, t.moment + r * call.Vp,
                                 u ? A(1) : keep[r]);
          continue;
        }
      accumulate<E, 1, LD>(m, steps<E>(n), weights + begin / Factor<E>::STEP, value, ldv, call.Vp,
                           t.moment + at * call.Vp, call.Vp, u ? nullptr : keep);
    }
    if (!cancelled) return;
    find_scores();  // the weights are in their place
    for (int r = 0; r < m; ++r)
      if (cancelled >> r & 1)
        add_spread<A>(t.score + r * LD, c.begin, c.end, t.reference[at + r], t.centre[at + r],
                      t.second + (at + r) * Vec<A>::W);
  };
  if (call.rounded)
    weigh(F{});
  else
    weigh(A{});
}

template <class F>
bool run_task(const ForwardCall<F>& call, const Task& task, RowStates<F>& t, const F* packed, const Task* later) {
  using A = Sum<F>;
  constexpr int KEYS = Block<A>::KEYS, P = Shape<F>::PANEL, L = Shape<F>::LANES, R = Shape<F>::ROWS;
  const int64_t tiles = (task.rows + R - 1) / R, padded = call.panels * P;
  ColumnSums<A> columns(call.columns + task.row_block * 2 * padded, padded);
  if (call.to.col_peak) columns.clear(padded);
  start_rows(call, task, t, tiles);
  KeySpan seen;
  for (int64_t i = 0; i < tiles; ++i) seen.add(t.span[i]);
  const int64_t first = seen.lo > task.origin ? seen.lo : task.origin;
  const int64_t lo = first < task.key_begin ? task.key_begin : task.origin + (first - task.origin) / KEYS * KEYS;
  const int64_t hi = seen.hi > task.key_end ? task.key_end : seen.hi;

  alignas(64) A query[DECODE_ROWS * DECODE_DIM];
  if (call.decode)
    for (int64_t r = 0; r < task.rows; ++r)
      decode_query<A>(reinterpret_cast<const A*>(t.query + r), L, call.p.D, query + r * DECODE_DIM);

  for (int64_t key = lo; key < hi; key += KEYS) {
    const KeyBlock<F> block = load_key_block<F>(call, task, key, hi, packed, t);
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t at = task.rows * i / tiles;
      if (key == lo) prefetch_task(call, later, i, tiles);
      run_tile<F>(call, task, t, i, at, static_cast<int>(task.rows * (i + 1) / tiles - at), block, query, columns);
    }
  }
  return epilogue(call, task, t);
}

template <class F>
bool run_merge(const ForwardCall<F>& call, const Merge& merge, Sum<F>* moment) {
  using A = Sum<F>;
  const int64_t ld = PARTIAL + call.Vp;
  bool fine = true;
  for (int64_t r = 0; r < merge.rows; ++r) {
    A peak = neg_inf<A>(), mass = 0, first = 0, spread = 0;
    RowTotals<A> total{};
    RowExtras<A> extras{};
    extras.argmax[0] = -1;
    for (int64_t s = 0; s < merge.splits; ++s) {  // in the order of the keys
      const int64_t from = merge.partial + s * merge.rows + r;
      const A top = call.partial[from * ld];
      if (top > peak) peak = top, extras.argmax[0] = call.partial_count[from * COUNTS + 2];
    }
    for (int64_t v = 0; v < call.Vp; ++v) moment[v] = 0;
    for (int64_t s = 0; s < merge.splits; ++s) {
      const int64_t from = merge.partial + s * merge.rows + r;
      A* part = call.partial + from * ld;
      extras.count[0] += call.partial_count[from * COUNTS];
      extras.rank[0] += call.partial_count[from * COUNTS + 1];
      if (part[0] == neg_inf<A>() && part[1] == 0) continue;
      const A d = part[0] - peak, ratio = exp2_one<A>(d);
      shift_about_centre<A>(d, ratio, part + 1, part + 2, part + 3, 1);
      if (part[1] > 0) {
        const A between = mass > 0 ? first / mass - part[2] / part[1] : A(0);
        spread += part[3] + between * between * (mass * (part[1] / (mass + part[1])));
      } else {
        spread += part[3];  // NaN travels on
      }
      mass += part[1];
      first += part[2];
      if (call.to.moment)
        for (int64_t v = 0; v < call.Vp; ++v) moment[v] += ratio * part[PARTIAL + v];
    }
    const int64_t f = merge.first + r;
    const Row row = make_row(call.p, call.plan.entries[call.plan.begin[merge.group] + f / call.p.Q], f % call.p.Q);
    extras.target[0] = call.partial[(merge.partial + r) * ld + 4];
    const A by = mass > 0 ? mass : A(1), ln2 = static_cast<A>(LN2);
    total.peak[0] = peak;
    total.mass[0] = mass;
    total.first[0] = first;
    total.spread[0] = spread;
    total.scale[0] = call.to.mean ? 1 / by : A(1);
    total.log_mass[0] = mass > 0 ? std::log(mass) : A(0);
    total.mean[0] = first * ln2 / by;
    total.variance[0] = spread * (ln2 * ln2) / by;
    fine &= write_rows<A>(call.p, call.to, &row, 1, total, extras, moment, 0);
  }
  return fine;
}

// Keys (and values, where they are packed) of a wave's groups, shared out among the threads.
template <class F>
void pack_wave(const ForwardCall<F>& call, const Wave& wave, F* temp, bool failed) {
  constexpr int P = Shape<F>::PANEL;
  constexpr int64_t STEP = 8;  // panels at a time
  const PartitaProblem& p = call.p;
  const int64_t steps = (call.panels + STEP - 1) / STEP, pieces = (wave.group_end - wave.group) * steps;
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < pieces; ++i) {
    if (failed) continue;
    const int64_t g = wave.group + i / steps, a = i % steps * STEP;
    const int64_t b = a + STEP < call.panels ? a + STEP : call.panels;
    F* to_group = call.packed + (g - wave.group) * call.packed_group;
    pack_panels<F>(call.keys(g), p.K, p.D, a, b, to_group + a * P * call.depth, temp);
    if (call.pack_value)
      pack_values(call, call.values(g), a * P, b * P < p.K ? b * P : p.K,
                  to_group + call.panels * P * call.depth + a * P / call.step * call.Vp);
  }
}

template <class F>
ForwardCall<F> make_call(const PartitaProblem& p, const Plan& plan, const PartitaSums& to) {
  using A = Sum<F>;
  constexpr int W = Vec<A>::W, P = Shape<F>::PANEL;
  ForwardCall<F> call{p,
                      plan,
                      to,
                      make_score_rule<A>(p),
                      steps<F>(p.D),
                      0,
                      (p.K + P - 1) / P,
                      to.first || to.stats || p.exact,  // exact rows have the same bits whatever is read of them
                      to.rank != nullptr,
                      false,
                      false};
  const bool same_dtype = p.dtype == Factor<A>::DTYPE;
  call.first_key = to.target_score && !p.target.data;
  call.Vp = to.moment ? round_up(p.V, W) : 0;
  // Values are read in place, unless that needs a conversion or their stride maps all rows to a few cache sets.
  const bool rows_alias = p.value.row > p.V && p.value.row * static_cast<int64_t>(sizeof(A)) % 4096 == 0;
  call.pack_value = to.moment && (!same_dtype || p.V % W != 0 || rows_alias);
  // The score of a target is made as those of a register block are, so that copies of it tie; so are those of a
  // backward pass.
  call.decode = !p.exact && to.forward_only && plan.rows <= DECODE_ROWS && p.D >= W && p.D <= DECODE_DIM &&
                !plan.prepacked && !p.target.data && !to.col_peak && same_dtype;
  call.few = p.exact && plan.rows <= DECODE_ROWS && !plan.prepacked;
  call.rounded = Factor<F>::STEP > 1 && to.moment && to.mean;
  call.step = call.rounded ? Factor<F>::STEP : 1;
  call.packed_group = call.panels * P * (call.depth + (call.pack_value ? call.Vp / call.step : 0));
  return call;
}

template <class F>
int32_t forward_as(const PartitaProblem& p, const Plan& plan, const PartitaSums& to) {
  using A = Sum<F>;
  constexpr int P = Shape<F>::PANEL;
  ForwardCall<F> call = make_call<F>(p, plan, to);
  int64_t wave_groups = 0;
  for (int64_t w = 0; w < plan.waves; ++w) {
    const int64_t n = plan.wave[w].group_end - plan.wave[w].group;
    wave_groups = n > wave_groups ? n : wave_groups;
  }
  const auto lay_out = [&](Arena c) {
    call.packed = c.take<F>(plan.prepacked ? wave_groups * call.packed_group : 0);
    call.partial = c.take<A>(plan.partial_rows * (PARTIAL + call.Vp));
    call.partial_count = c.take<int64_t>(plan.partial_rows * COUNTS);
    call.columns = c.take<A>(to.col_peak ? plan.row_blocks * 2 * call.panels * P : 0);
    return c.used;
  };
  const SharedWorkspace shared(lay_out(Arena{nullptr}) + 64);
  if (!shared.data) return NO_MEMORY;
  lay_out(Arena{static_cast<char*>(shared.data)});

  // A whole head, with room to spare in the second-level cache of most processors.
  const bool ahead = !plan.prepacked && plan.merges == 0 &&
                     (p.K * (p.D + p.V) + plan.rows * p.D) * static_cast<int64_t>(dtype_size(p.dtype)) <= 512 << 10;

  int32_t failed = 0, not_finite = 0;
#pragma omp parallel num_threads(static_cast<int>(plan.threads)) reduction(| : failed, not_finite)
  {
    FlushDenormals flush;
    RowStates<F> t;
    Arena count{nullptr};
    t.lay_out(count, plan.rows, p.D, call.Vp, !plan.prepacked, call.pack_value && !plan.prepacked);
    Arena arena{static_cast<char*>(thread_workspace(count.used + 64))};
    failed = !arena.base;
    if (arena.base) t.lay_out(arena, plan.rows, p.D, call.Vp, !plan.prepacked, call.pack_value && !plan.prepacked);
    for (int64_t w = 0; w < plan.waves; ++w) {
      const Wave& wave = plan.wave[w];
      if (plan.prepacked) pack_wave<F>(call, wave, t.row_temp, failed);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = wave.task; i < wave.task_end; ++i) {
        if (failed) continue;
        const Task& task = plan.task[i];
        const Task* later = ahead && i + plan.threads < wave.task_end ? &plan.task[i + plan.threads] : nullptr;
        not_finite |= !run_task<F>(call, task, t, call.packed + (task.group - wave.group) * call.packed_group, later);
      }
    }
    // Each loop ends in a barrier, which on a busy machine costs a time slice: none where there is nothing to do.
    if (plan.merges) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < plan.merges; ++i)
        if (!failed) not_finite |= !run_merge<F>(call, plan.merge[i], t.moment);
    }
    if (to.col_peak) {
#pragma omp for schedule(static)
      for (int64_t j = 0; j < p.K; ++j)
        if (!failed) not_finite |= !write_column<A>(call.columns, plan.row_blocks, call.panels * P, j, to);
    }
  }
  return failed ? NO_MEMORY : not_finite ? NOT_FINITE : FINITE;
}

template <class F>
Tuning tuning_as(const PartitaProblem& p) {
  Tuning t{};
  t.tile = Shape<F>::ROWS;
  t.keys = Block<Sum<F>>::KEYS;
  t.packed_bytes = Factor<F>::BYTES * (p.K + Shape<F>::PANEL) * (p.D + p.V);
  return t;
}

}  // namespace

Tuning forward_tuning(const PartitaProblem& p) {
  return with_factors(p.dtype, [&](auto f) { return tuning_as<decltype(f)>(p); });
}

int32_t forward(const PartitaProblem& p, const Plan& plan, const PartitaSums& to) {
  return with_factors(p.dtype, [&](auto f) { return forward_as<decltype(f)>(p, plan, to); });
}

}  // namespace PARTITA_ISA
}  // namespace partita
