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
      if (call.need_key && !call.query_lies)
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
  t.query_from = t.query_rows;
  t.query_step = call.Dp;
  if (!call.query_lies) return;
  const int64_t entry = call.plan.entries[call.plan.entry_begin[task.group]];
  t.query_from = reinterpret_cast<const F*>(view_of(p.query, p.dtype, entry, task.row + at).data);
  t.query_step = p.query.row;
}

template <class A>
struct KeyGradients {  // of a group
  A *key, *value;
  int64_t first;  // the first key of `key`
};

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

// What the queries receive from ranges of keys, where those are tasks of their own. The first range adds to the result
// itself; another has memory of its own, which is added to the result when those before it have been, and then serves
// the next one. So there are few more of them than threads, and the sum has the order of the keys.
template <class F>
class QueryParts {
  using A = Sum<F>;

 public:
  explicit QueryParts(const BackwardCall<F>& call)
      : call_(call),
        slots_(call.need_query && call.plan.key_splits > 1 ? call.plan.groups * call.plan.row_splits : 0) {}
  ~QueryParts() {
    for (int64_t i = 0; i < spares_; ++i) std::free(spare_[i]);
    for (int64_t i = 0; i < slots_ * call_.plan.key_splits; ++i)  // of a call that failed
      if (done_[i] != call_.sum_key) std::free(done_[i]);
  }
  QueryParts(const QueryParts&) = delete;
  QueryParts& operator=(const QueryParts&) = delete;

  void lay_out(Arena& c) {
    const int64_t n = slots_ * call_.plan.key_splits;
    next_ = c.take<int64_t>(slots_);
    done_ = c.take<A*>(n);
    spare_ = c.take<A*>(n);
    if (!c.base) return;
    for (int64_t i = 0; i < slots_; ++i) next_[i] = 0;
    for (int64_t i = 0; i < n; ++i) done_[i] = nullptr;
  }

  // Zeros for the rows of a task, or null.
  A* take(const BackwardTask& task) {
    if (task.key_split == 0 || !slots_) return call_.sum_key;
    A* part = nullptr;
#pragma omp critical(partita_query_parts)
    if (spares_) part = spare_[--spares_];
    const size_t bytes = sizeof(A) * static_cast<size_t>(call_.p.B * call_.p.Q * call_.Dp);
    if (!part) part = static_cast<A*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    if (part) each_range(task, [&](int64_t at, int64_t n) { std::memset(part + at, 0, sizeof(A) * n); });
    return part;
  }

  void give(const BackwardTask& task, A* part) {
    if (!slots_) return;
    const int64_t slot = task.row_split * call_.plan.groups + task.group, splits = call_.plan.key_splits;
#pragma omp critical(partita_query_parts)
    {
      done_[slot * splits + task.key_split] = part;
      for (int64_t& k = next_[slot]; k < splits && done_[slot * splits + k]; ++k) {
        A*& from = done_[slot * splits + k];
        if (k > 0) {
          each_range(task, [&](int64_t at, int64_t n) {
            for (int64_t i = at; i < at + n; ++i) call_.sum_key[i] += from[i];
          });
          spare_[spares_++] = from;
        }
        from = nullptr;
      }
    }
  }

 private:
  template <class Each>
  void each_range(const BackwardTask& task, const Each& each) const {
    for (int64_t i = call_.plan.entry_begin[task.group]; i < call_.plan.entry_begin[task.group + 1]; ++i)
      each((call_.plan.entries[i] * call_.p.Q + task.row) * call_.Dp, (task.row_end - task.row) * call_.Dp);
  }

  const BackwardCall<F>& call_;
  int64_t slots_, spares_ = 0;
  int64_t* next_ = nullptr;  // of each group and row range: the first range of keys that has not been added
  A **done_ = nullptr, **spare_ = nullptr;
};

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

// Rows [at, at + n) of a task against keys [begin, end); they have been packed. What the keys receive is added to that
// of earlier rows, where there are `earlier` ones.
template <class F>
bool run_chunk(const BackwardCall<F>& call, const BackwardTask& task, int64_t n, int64_t begin, int64_t end,
               bool earlier, const KeyGradients<Sum<F>>& to, BackwardWorkspace<F>& t) {
  using A = Sum<F>;
  constexpr int KEYS = BackwardBlock<F>::KEYS, P = Shape<F>::PANEL, R = Shape<F>::ROWS, TILES = BackwardBlock<F>::TILES;
  const PartitaProblem& p = call.p;
  const int64_t entry = call.plan.entries[call.plan.entry_begin[task.group]], tiles = (n + R - 1) / R;
  const RowView keys = view_of(p.key, p.dtype, entry),
                values = call.value ? view_of(p.value, p.dtype, entry) : RowView{};
  bool fine = true;
  KeySpan seen;
  for (int64_t i = 0; i < tiles; ++i) seen.add(t.span[i]);
  for (int64_t key = begin; key < end; key += KEYS) {
    const int64_t stop = key + KEYS < end ? key + KEYS : end, count = stop - key;
    bool touched = false;
    if (seen.lo < stop && seen.hi > key) {
      if (call.need_key) std::memset(t.grad_key, 0, sizeof(A) * static_cast<size_t>(count * call.Dp));
      if (call.need_value) std::memset(t.grad_value, 0, sizeof(A) * static_cast<size_t>(count * call.Vp));
      const int64_t panels = (count + P - 1) / P;
      pack_panels<F>(rows_from(keys, key), p.K - key, p.D, 0, panels, t.key, t.row_temp);
      if (call.value) pack_panels<F>(rows_from(values, key), p.K - key, p.V, 0, panels, t.val, t.row_temp);
      BackwardKeys<F> block{key, stop, reinterpret_cast<const F*>(keys.data) + key * keys.row, keys.row};
      if (call.need_query && !call.key_lies) {
        pack_rows<F>(keys, p.D, call.Dp, key, stop, t.key_rows);
        block.rows = t.key_rows;
        block.stride = call.Dp;
      }
      for (int64_t i = 0; i < tiles; i += TILES)
        fine &= backward_block<F>(call, t, call.plan.in_turn ? task.key_split > 0 : task.key_split,
                                  {n, tiles, i, i + TILES < tiles ? i + TILES : tiles}, block, touched);
    }
    const auto store = [&](const A* from, int64_t width, int64_t padded, A* sums) {
      if (touched)
        fine &= store_gradient<A>(from, count, width, padded, sums, !earlier);
      else if (!earlier)
        std::memset(sums, 0, sizeof(A) * static_cast<size_t>(count * width));
    };
    if (call.need_key) store(t.grad_key, p.D, call.Dp, to.key + (key - to.first) * p.D);
    if (call.need_value) store(t.grad_value, p.V, call.Vp, to.value + key * p.V);
  }
  return fine;
}

template <class F>
bool run_backward_task(const BackwardCall<F>& call, const BackwardTask& task, BackwardWorkspace<F>& t) {
  using A = Sum<F>;
  constexpr int R = Shape<F>::ROWS;
  const PartitaProblem& p = call.p;
  const int64_t first_entry = call.plan.entry_begin[task.group],
                members = call.plan.entry_begin[task.group + 1] - first_entry,
                total = members * (task.row_end - task.row);
  const int64_t where = (task.row_split * call.plan.groups + task.group) * p.K;
  KeyGradients<A> to{call.need_key && !call.round_key ? call.part_key + where * p.D : t.key_sums,
                     call.need_value ? call.part_value + where * p.V : nullptr, 0};
  bool fine = true;
  const bool moved = call.plan.origin;  // key blocks of chunks may overlap
  if (moved && task.key_split == 0) {
    if (call.need_key) std::memset(to.key, 0, sizeof(A) * static_cast<size_t>(p.K * p.D));
    if (call.need_value) std::memset(to.value, 0, sizeof(A) * static_cast<size_t>(p.K * p.V));
  }
  const int64_t span = call.span ? call.span : task.key_end - task.key_begin;
  const int64_t chunks = (total + call.chunk - 1) / call.chunk;  // of one size
  const int64_t chunk = chunks > 1 ? round_up((total + chunks - 1) / chunks, 2) : total;
  int64_t packed = -1;  // the rows that are
  for (int64_t from = task.key_begin; from < task.key_end; from += span) {
    const int64_t until = from + span < task.key_end ? from + span : task.key_end;
    if (call.round_key) to.first = from;
    for (int64_t at = 0, n; at == 0 || at < total; at += n ? n : 1) {
      n = total - at < chunk ? total - at : chunk;
      const int64_t origin = common_origin(call, task, at, n), last = origin + until < p.K ? origin + until : p.K;
      if (packed != at) pack_chunk(call, task, packed = at, n, (n + R - 1) / R, t);
      fine &= run_chunk<F>(call, task, n, origin + from, last, at > 0 || moved, to, t);
    }
    if (!call.round_key) continue;
    uint16_t* out = static_cast<uint16_t*>(call.g.key) + (where + from) * p.D;
    for (int64_t i = 0; i < (until - from) * p.D; ++i) out[i] = to_bfloat16(to.key[i]);
  }
  if (call.plan.in_turn && task.key_split > 0)
    for (int64_t f = 0; f < total; ++f) {
      const int64_t member = call.plan.entries[first_entry + f / (task.row_end - task.row)];
      add_segment(call, member * p.Q + task.row + f % (task.row_end - task.row));
    }
  return fine;
}

// dquery = scale * sum, dscale = <sum, query>, and the row sums of ds.
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

template <class A, class To>
bool add_parts(const A* parts, int64_t splits, int64_t step, int64_t begin, int64_t end, To* to) {
  A probe = 0;
  for (int64_t i = begin; i < end; ++i) {
    A sum = parts[i];
    for (int64_t s = 1; s < splits; ++s) sum += parts[s * step + i];
    if constexpr (sizeof(To) == 2)
      to[i] = to_bfloat16(static_cast<float>(sum));
    else
      to[i] = sum;
    probe += sum * 0;
  }
  return probe == 0;
}

// Whether the rows of queries can be the right factor of a product as they are: one after the other, and times 1.
template <class F>
bool query_lies(const PartitaProblem& p, const BackwardPlan& plan) {
  if (p.dtype != Factor<Sum<F>>::DTYPE || p.D % Vec<F>::W || plan.groups != p.B || p.scale.row) return false;
  for (int64_t entry = 0; entry < p.B; ++entry)
    if (*row_at<Sum<F>>(p.scale, entry, 0) != 1) return false;
  return true;
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
                       query_lies<F>(p, plan),
                       false,
                       BackwardBlock<F>::chunk(p.D, g.moment ? p.V : 0),
                       0,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr,
                       round_up(p.K, Shape<F>::PANEL)};
  call.key_lies = p.dtype == Factor<A>::DTYPE && p.D % W == 0;
  const int64_t rows = p.B * p.Q, key_size = plan.groups * p.K * p.D, value_size = plan.groups * p.K * p.V;
  const int64_t sums_of_keys = plan.in_turn ? 2 : plan.key_splits;  // but for the queries
  const bool in_place = !plan.in_turn && p.D % W == 0 && g.query;   // the result holds the sums
  const bool split = plan.row_splits > 1;
  int64_t longest = 0;
  for (int64_t i = 0; i < plan.begin[plan.lists]; ++i) {
    const BackwardTask& task = plan.task[i];
    const int64_t members = plan.entry_begin[task.group + 1] - plan.entry_begin[task.group];
    const int64_t n = members * (task.row_end - task.row);
    longest = n > longest ? n : longest;
  }
  const bool everywhere = !p.start.data && !p.stop.data && !plan.origin;
  call.round_key = call.need_key && g.rounded && everywhere && !split;
  if (everywhere && (longest > call.chunk || call.round_key)) {
    constexpr int64_t KEYS = BackwardBlock<F>::KEYS;
    const int64_t fitting = BackwardBlock<F>::SPAN_BYTES / static_cast<int64_t>(sizeof(A)) / (p.D + 1) / KEYS;
    call.span = KEYS * (longest > call.chunk && fitting > 1 ? fitting : 1);
  }
  longest = longest < call.chunk ? longest : call.chunk;
  const bool key_later = split || (g.rounded && !call.round_key);  // summed, and rounded, in the end
  QueryParts<F> parts(call);
  const int64_t query_sums = (plan.in_turn ? 2 : 1) * rows;
  const auto lay_out = [&](Arena c) {
    call.sum_key = in_place ? static_cast<A*>(g.query) : c.take<A>(call.need_query ? query_sums * call.Dp : 0);
    call.column = g.col_peak ? c.take<A>(2 * call.padded) : nullptr;
    call.sum_row = c.take<A>(g.bias_row ? sums_of_keys * rows : 0);
    call.sum_scale = PAIRS && g.scale ? c.take<A>(sums_of_keys * rows) : nullptr;
    call.part_key = key_later ? c.take<A>(call.need_key ? plan.row_splits * key_size : 0) : static_cast<A*>(g.key);
    call.part_value = split ? c.take<A>(call.need_value ? plan.row_splits * value_size : 0) : static_cast<A*>(g.value);
    parts.lay_out(c);
    return c.used;
  };
  const SharedWorkspace shared(lay_out(Arena{nullptr}) + 64);
  if (!shared.data) return NO_MEMORY;
  lay_out(Arena{static_cast<char*>(shared.data)});
  if (g.col_peak) pack_columns(g, p.K, call.padded, call.column);
  if (g.bias_row) std::memset(call.sum_row, 0, sizeof(A) * static_cast<size_t>(sums_of_keys * rows));
  if (call.sum_scale) std::memset(call.sum_scale, 0, sizeof(A) * static_cast<size_t>(sums_of_keys * rows));
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
    const int64_t sums = call.need_query ? query_sums * call.Dp : 0;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < sums; i += STEP)
      std::memset(call.sum_key + i, 0, sizeof(A) * static_cast<size_t>(sums - i < STEP ? sums - i : STEP));
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan.lists; ++i)
      for (int64_t j = plan.begin[i]; j < plan.begin[i + 1]; ++j) {
        const BackwardTask& task = plan.task[j];
        A* part = failed ? nullptr : parts.take(task);
        failed |= call.need_query && !part;
        if (failed) continue;
        t.query_sums = part + (plan.in_turn && task.key_split > 0 ? rows * call.Dp : 0);
        not_finite |= !run_backward_task<F>(call, task, t);
        parts.give(task, part);
      }
    const int64_t finished = call.need_query || call.sum_scale || g.bias_row ? rows : 0;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < finished; ++i)
      if (!failed) not_finite |= !finish_query_row<F>(call, i, t.temp);
    const int64_t key_parts = key_later && call.need_key ? key_size : 0,
                  value_parts = split && call.need_value ? value_size : 0;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < key_parts; i += STEP) {
      const int64_t end = i + STEP < key_size ? i + STEP : key_size;
      not_finite |=
          !(g.rounded ? add_parts<A>(call.part_key, plan.row_splits, key_size, i, end, static_cast<uint16_t*>(g.key))
                      : add_parts<A>(call.part_key, plan.row_splits, key_size, i, end, static_cast<A*>(g.key)));
    }
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
