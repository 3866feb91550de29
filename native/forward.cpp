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

constexpr int64_t PARTIAL = 6, COUNTS = 4;  // numbers of an unfinished row before its moment, and whole ones

template <class A>
struct ForwardCall {
  const PartitaProblem& p;
  const Plan& plan;
  const PartitaSums& to;
  ScoreRule<A> sc;
  int64_t Vp, panels;
  bool moments, rank, pack_value, decode;
  bool first_key = false;  // its score is wanted
  A* packed = nullptr;     // of the wave: for each group its key panels, then its padded values
  int64_t packed_group = 0;
  A* partial = nullptr;              // peak, mass, first, second, target, least, moment of each unfinished row
  int64_t* partial_count = nullptr;  // count, rank, argmax and argmin
  A* columns = nullptr;              // of each row block

  RowView keys(int64_t group) const { return rows_of(p.key, group); }
  RowView values(int64_t group) const { return rows_of(p.value, group); }
  RowView rows_of(const PartitaOperand& o, int64_t group) const {
    const int64_t entry = plan.entries[plan.begin[group]];
    return {static_cast<const char*>(o.data) + o.offset[entry] * static_cast<int64_t>(dtype_size(p.dtype)), o.row,
            p.dtype};
  }
};

// The score of one row's target with the roundings of the tile, so that a copy of the target's key ties with it.
template <class A>
inline A target_score(const ScoreRule<A>& sc, const Row& row, const RowView& keys, const A* query, int64_t step,
                      A* temp) {
  using V = Vec<A>;
  const PartitaProblem& p = *sc.problem;
  const int64_t j = row.target;
  if (j < 0 || j >= p.K || !visible(p, row, j)) return neg_inf<A>();
  convert_row<A>(keys.data, j * keys.row, keys.dtype, p.D, p.D, A(1), temp);
  typename V::T total = V::set(0);
  for (int64_t k = 0; k < p.D; k += CHAIN) {
    typename V::T acc = V::set(0);
    for (int64_t i = k; i < p.D && i < k + CHAIN; ++i) acc = V::fma(V::set(query[i * step]), V::set(temp[i]), acc);
    total = k ? V::add(total, acc) : acc;
  }
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

template <class A>
void start_rows(const ForwardCall<A>& call, const Task& task, RowStates<A>& t, int64_t tiles) {
  constexpr int W = Vec<A>::W, L = Shape<A>::LANES;
  const PartitaProblem& p = call.p;
  const int64_t* entry = call.plan.entries + call.plan.begin[task.group] + task.first / p.Q;
  for (int64_t r = 0, index = task.first % p.Q; r < task.rows; ++r, ++index) {
    if (index == p.Q) ++entry, index = 0;
    t.row[r] = make_row(p, *entry, index);
    t.peak[r] = t.reference[r] = t.base[r] = neg_inf<A>();
    t.centre[r] = 0;
    t.count[r] = t.rank[r] = 0;
    t.least[r] = -neg_inf<A>();
    t.argmax[r] = t.argmin[r] = -1;
    t.target[r] = neg_inf<A>();
  }
  const size_t lanes = sizeof(A) * static_cast<size_t>(task.rows * W);
  std::memset(t.mass, 0, lanes);
  std::memset(t.first, 0, lanes);
  std::memset(t.second, 0, lanes);
  if (call.to.moment) std::memset(t.moment, 0, sizeof(A) * static_cast<size_t>(task.rows * call.Vp));
  const RowView keys = p.K ? call.keys(task.group) : RowView{};
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t a = task.rows * i / tiles, b = task.rows * (i + 1) / tiles;
    A* query = t.query + i * p.D * L;
    t.span[i] = key_span(t.row + a, b - a);
    pack_queries<A>(call.sc, t.row + a, static_cast<int>(b - a), t.temp, query);
    if (p.target.data)
      for (int64_t r = a; r < b; ++r)
        t.target[r] = target_score<A>(call.sc, t.row[r], keys, query + (r - a), L, t.temp);
  }
}

template <class A>
bool epilogue(const ForwardCall<A>& call, const Task& task, const RowStates<A>& t) {
  using V = Vec<A>;
  const PartitaProblem& p = call.p;
  const bool counted = call.sc.masked || p.bias.data;
  bool fine = true;
  RowTotals<A> sum;
  for (int64_t r = 0; r < task.rows; ++r) {
    const Row& row = t.row[r];
    const int lane = static_cast<int>(r % V::W);
    if (lane == 0) sum_lanes<A>(t, r, task.rows, call.moments, call.to.mean, sum);
    int64_t count = t.count[r];
    if (!counted) {
      const int64_t lo = row.start > task.key_begin ? row.start : task.key_begin;
      const int64_t hi = row.stop < task.key_end ? row.stop : task.key_end;
      count = hi > lo ? hi - lo - (p.exclude_self && row.index >= lo && row.index < hi) : 0;
    }
    if (task.partial < 0) {
      fine &= write_row<A>(p, call.to, row, sum.row(lane, t.peak[r]), t.moment + r * call.Vp, count, t.rank[r],
                           t.target[r], {t.least[r], t.argmax[r], t.argmin[r]});
    } else {
      A* part = call.partial + (task.partial + r) * (PARTIAL + call.Vp);
      part[0] = t.peak[r];
      part[1] = sum.mass[lane];
      part[2] = sum.first[lane];
      part[3] = sum.spread[lane];
      part[4] = t.target[r];
      part[5] = t.least[r];
      for (int64_t v = 0; v < call.Vp; ++v) part[PARTIAL + v] = sum.ratio[lane] * t.moment[r * call.Vp + v];
      int64_t* counts = call.partial_count + (task.partial + r) * COUNTS;
      counts[0] = count;
      counts[1] = t.rank[r];
      counts[2] = t.argmax[r];
      counts[3] = t.argmin[r];
    }
  }
  return fine;
}

// Asks the cache for a share (`part` of `parts`) of what a later task reads first, while this one computes: heads of a
// short sequence are otherwise waited for, one after the other.
template <class A>
void prefetch_task(const ForwardCall<A>& call, const Task* task, int64_t part, int64_t parts) {
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

// Key panels and values of one key block, packed or as they lie.
template <class A>
struct KeyBlock {
  int64_t begin, end;    // keys
  const A* panels;       // null for the decode kernel, which reads keys as they lie
  const A* value;        // null where no moment is wanted
  int64_t value_stride;  // from one key's value to the next
};

template <class A>
KeyBlock<A> load_key_block(const ForwardCall<A>& call, const Task& task, int64_t key, int64_t hi, const A* packed,
                           RowStates<A>& t) {
  constexpr int KEYS = Block<A>::KEYS, P = Shape<A>::PANEL;
  const PartitaProblem& p = call.p;
  KeyBlock<A> block{key, key + KEYS < p.K ? key + KEYS : p.K, packed + key * p.D, nullptr, call.Vp};
  const int64_t used = block.end < hi ? block.end : hi;
  if (!call.plan.prepacked && !call.decode) {
    pack_panels<A>(call.keys(task.group), p.K, p.D, key / P, (used + P - 1) / P, t.panel, t.temp);
    block.panels = t.panel;
  }
  if (!call.to.moment) return block;
  const RowView values = call.values(task.group);
  if (!call.pack_value) {
    block.value = reinterpret_cast<const A*>(values.data) + key * values.row;
    block.value_stride = values.row;
  } else if (call.plan.prepacked) {
    block.value = packed + call.panels * P * p.D + key * call.Vp;
  } else {
    pack_rows<A>(values, p.V, call.Vp, key, used, t.value);
    block.value = t.value;
  }
  return block;
}

// One register tile (rows [at, at + m) of the task, number i) against one key block: scores, online softmax, moments.
template <class A>
void run_tile(const ForwardCall<A>& call, const Task& task, RowStates<A>& t, int64_t i, int64_t at, int m,
              const KeyBlock<A>& block, const A* decode_rows, const ColumnSums<A>& columns) {
  constexpr int P = Shape<A>::PANEL, LD = Block<A>::LD, L = Shape<A>::LANES;
  const PartitaProblem& p = call.p;
  const int64_t key = block.begin;
  ColumnRange runs[Block<A>::RUNS];
  const VisibleColumns c = visible_columns<A>(p, call.sc.masked, t.span[i], t.row + at, m, key, block.end, runs);
  if (!c.runs) return;
  for (int u = 0; u < c.runs; ++u) {
    const ColumnRange run = runs[u];
    if (call.decode)
      for (int r = 0; r < m; ++r)
        decode_scores<A>(decode_rows + r * DECODE_DIM, p.D, call.keys(task.group), key + run.begin, run.end - run.begin,
                         p.K, t.score + r * LD + run.begin);
    else
      score<A, LD>(m, p.D, t.query + i * p.D * L, block.panels + run.begin * p.D, (run.end - run.begin) / P,
                   t.score + run.begin);
  }
  if (!call.sc.plain || !c.whole) bias_and_mask<A, LD>(call.sc, t.row + at, m, key, c, runs, t.score, t.temp, nullptr);
  if (call.first_key && key == 0 && c.begin == 0)
    for (int r = 0; r < m; ++r) t.target[at + r] = t.score[r * LD];
  if (call.to.col_peak) add_to_columns<A, LD>(t.score, m, c.begin, c.end, key, columns);
  if (call.to.least) update_extremes<A>(t, at, m, c, key);
  alignas(64) A keep[L];
  online_softmax<A>(call.sc, t, at, m, c, call.moments, call.rank, keep);
  if (!block.value) return;
  const int64_t ldv = block.value_stride;
  for (int u = 0; u < c.runs; ++u) {
    const int64_t begin = runs[u].begin, n = (runs[u].end < c.last ? runs[u].end : c.last) - begin;
    const A* value = block.value + begin * ldv;
    if (call.decode)
      for (int r = 0; r < m; ++r)
        decode_accumulate<A>(n, t.score + r * LD + begin, value, ldv, call.Vp, t.moment + r * call.Vp,
                             u ? A(1) : keep[r]);
    else
      accumulate<A, 1, LD>(m, n, t.score + begin, value, ldv, call.Vp, t.moment + at * call.Vp, call.Vp,
                           u ? nullptr : keep);
  }
}

template <class A>
bool run_task(const ForwardCall<A>& call, const Task& task, RowStates<A>& t, const A* packed, const Task* later) {
  constexpr int KEYS = Block<A>::KEYS, P = Shape<A>::PANEL, L = Shape<A>::LANES, R = Shape<A>::ROWS;
  const int64_t tiles = (task.rows + R - 1) / R, padded = call.panels * P;
  ColumnSums<A> columns(call.columns + task.row_block * 2 * padded, padded);
  if (call.to.col_peak) columns.clear(padded);
  start_rows(call, task, t, tiles);
  KeySpan seen;
  for (int64_t i = 0; i < tiles; ++i) seen.add(t.span[i]);
  const int64_t lo = seen.lo < task.key_begin ? task.key_begin : seen.lo / KEYS * KEYS;
  const int64_t hi = seen.hi > task.key_end ? task.key_end : seen.hi;

  alignas(64) A query[DECODE_ROWS * DECODE_DIM];
  if (call.decode)
    for (int64_t r = 0; r < task.rows; ++r) decode_query<A>(t.query + r, L, call.p.D, query + r * DECODE_DIM);

  for (int64_t key = lo; key < hi; key += KEYS) {
    const KeyBlock<A> block = load_key_block<A>(call, task, key, hi, packed, t);
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t at = task.rows * i / tiles;
      if (key == lo) prefetch_task(call, later, i, tiles);
      run_tile<A>(call, task, t, i, at, static_cast<int>(task.rows * (i + 1) / tiles - at), block, query, columns);
    }
  }
  return epilogue(call, task, t);
}

template <class A>
bool run_merge(const ForwardCall<A>& call, const Merge& merge, A* moment) {
  const int64_t ld = PARTIAL + call.Vp;
  bool fine = true;
  for (int64_t r = 0; r < merge.rows; ++r) {
    A peak = neg_inf<A>(), mass = 0, first = 0, spread = 0;
    int64_t count = 0, rank = 0;
    RowEnds<A> ends{-neg_inf<A>(), -1, -1};
    for (int64_t s = 0; s < merge.splits; ++s) {  // in the order of the keys
      const int64_t from = merge.partial + s * merge.rows + r;
      const A top = call.partial[from * ld], low = call.partial[from * ld + 5];
      const int64_t* counts = call.partial_count + from * COUNTS;
      if (top > peak) peak = top, ends.argmax = counts[2];
      if (low < ends.least) ends.least = low, ends.argmin = counts[3];
    }
    for (int64_t v = 0; v < call.Vp; ++v) moment[v] = 0;
    for (int64_t s = 0; s < merge.splits; ++s) {
      const int64_t from = merge.partial + s * merge.rows + r;
      A* part = call.partial + from * ld;
      count += call.partial_count[from * COUNTS];
      rank += call.partial_count[from * COUNTS + 1];
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
    const A target = call.partial[(merge.partial + r) * ld + 4];
    const A by = mass > 0 ? mass : A(1), ln2 = static_cast<A>(LN2);
    const RowTotal<A> total{peak,
                            mass,
                            first,
                            spread,
                            call.to.mean ? 1 / by : A(1),
                            mass > 0 ? std::log(mass) : A(0),
                            first * ln2 / by,
                            spread * (ln2 * ln2) / by};
    fine &= write_row<A>(call.p, call.to, row, total, moment, count, rank, target, ends);
  }
  return fine;
}

// Keys (and values, where they are packed) of a wave's groups, shared out among the threads.
template <class A>
void pack_wave(const ForwardCall<A>& call, const Wave& wave, A* temp, bool failed) {
  constexpr int P = Shape<A>::PANEL;
  constexpr int64_t STEP = 8;  // panels at a time
  const PartitaProblem& p = call.p;
  const int64_t steps = (call.panels + STEP - 1) / STEP, pieces = (wave.group_end - wave.group) * steps;
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < pieces; ++i) {
    if (failed) continue;
    const int64_t g = wave.group + i / steps, a = i % steps * STEP;
    const int64_t b = a + STEP < call.panels ? a + STEP : call.panels;
    A* to_group = call.packed + (g - wave.group) * call.packed_group;
    pack_panels<A>(call.keys(g), p.K, p.D, a, b, to_group + a * P * p.D, temp);
    if (call.pack_value)
      pack_rows<A>(call.values(g), p.V, call.Vp, a * P, b * P < p.K ? b * P : p.K,
                   to_group + call.panels * P * p.D + a * P * call.Vp);
  }
}

template <class A>
ForwardCall<A> make_call(const PartitaProblem& p, const Plan& plan, const PartitaSums& to) {
  constexpr int W = Vec<A>::W, P = Shape<A>::PANEL;
  ForwardCall<A> call{
      p, plan, to, make_score_rule<A>(p), 0, (p.K + P - 1) / P, to.first || to.stats, to.rank != nullptr, false, false};
  const bool same_dtype = p.dtype == (sizeof(A) == 4 ? PARTITA_FLOAT32 : PARTITA_FLOAT64);
  call.first_key = to.target_score && !p.target.data;
  call.Vp = to.moment ? round_up(p.V, W) : 0;
  // Values are read as they lie, unless that needs a conversion or rows so far apart that they share a few cache sets.
  const bool rows_alias = p.value.row > p.V && p.value.row * static_cast<int64_t>(sizeof(A)) % 4096 == 0;
  call.pack_value = to.moment && (!same_dtype || p.V % W != 0 || rows_alias);
  // The score of a target is made as those of a register block are, so that copies of it tie; so are those of a
  // backward pass.
  call.decode = to.forward_only && plan.rows <= DECODE_ROWS && p.D >= W && p.D <= DECODE_DIM && !plan.prepacked &&
                !p.target.data && !to.col_peak && same_dtype;
  call.packed_group = call.panels * P * (p.D + (call.pack_value ? call.Vp : 0));
  return call;
}

template <class A>
int32_t forward_as(const PartitaProblem& p, const Plan& plan, const PartitaSums& to) {
  constexpr int P = Shape<A>::PANEL;
  ForwardCall<A> call = make_call<A>(p, plan, to);
  int64_t wave_groups = 0;
  for (int64_t w = 0; w < plan.waves; ++w) {
    const int64_t n = plan.wave[w].group_end - plan.wave[w].group;
    wave_groups = n > wave_groups ? n : wave_groups;
  }
  const auto lay_out = [&](Arena c) {
    call.packed = c.take<A>(plan.prepacked ? wave_groups * call.packed_group : 0);
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
    RowStates<A> t;
    Arena count{nullptr};
    t.lay_out(count, plan.rows, p.D, call.Vp, !plan.prepacked, call.pack_value && !plan.prepacked);
    Arena arena{static_cast<char*>(thread_workspace(count.used + 64))};
    failed = !arena.base;
    if (arena.base) t.lay_out(arena, plan.rows, p.D, call.Vp, !plan.prepacked, call.pack_value && !plan.prepacked);
    for (int64_t w = 0; w < plan.waves; ++w) {
      const Wave& wave = plan.wave[w];
      if (plan.prepacked) pack_wave<A>(call, wave, t.temp, failed);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = wave.task; i < wave.task_end; ++i) {
        if (failed) continue;
        const Task& task = plan.task[i];
        const Task* later = ahead && i + plan.threads < wave.task_end ? &plan.task[i + plan.threads] : nullptr;
        not_finite |= !run_task<A>(call, task, t, call.packed + (task.group - wave.group) * call.packed_group, later);
      }
    }
    // Each loop ends in a barrier, which on a busy machine costs a time slice: none where there is nothing to do.
    if (plan.merges) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < plan.merges; ++i)
        if (!failed) not_finite |= !run_merge<A>(call, plan.merge[i], t.moment);
    }
    if (to.col_peak) {
#pragma omp for schedule(static)
      for (int64_t j = 0; j < p.K; ++j)
        if (!failed) not_finite |= !write_column<A>(call.columns, plan.row_blocks, call.panels * P, j, to);
    }
  }
  return failed ? NO_MEMORY : not_finite ? NOT_FINITE : FINITE;
}

template <class A>
Tuning tuning_as(const PartitaProblem& p) {
  Tuning t{};
  t.tile = Shape<A>::ROWS;
  t.keys = Block<A>::KEYS;
  t.packed_bytes = static_cast<int64_t>(sizeof(A)) * (p.K + Shape<A>::PANEL) * (p.D + p.V);
  return t;
}

}  // namespace

Tuning forward_tuning(const PartitaProblem& p) {
  return p.dtype == PARTITA_FLOAT64 ? tuning_as<double>(p) : tuning_as<float>(p);
}

int32_t forward(const PartitaProblem& p, const Plan& plan, const PartitaSums& to) {
  return p.dtype == PARTITA_FLOAT64 ? forward_as<double>(p, plan, to) : forward_as<float>(p, plan, to);
}

}  // namespace PARTITA_ISA
}  // namespace partita
