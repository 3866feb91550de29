#include "planner.h"

#include <algorithm>
#include <map>
#include <utility>

namespace partita {

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What exact sums are cut by, whatever the machine and the rows are: sums over rows for this number of threads, with at
// most this many numbers of partial sums, and sums over keys at multiples of this number of keys.
constexpr int64_t EXACT_THREADS = 4, EXACT_PARTS = 1 << 26, EXACT_KEYS = 8192;

// Entries sorted by group, and where each group starts.
void sort_entries(const std::vector<int64_t>& group, int64_t groups, std::vector<int64_t>& entries,
                  std::vector<int64_t>& begin) {
  begin.assign(static_cast<size_t>(groups) + 1, 0);
  for (const int64_t g : group) ++begin[g + 1];
  for (int64_t g = 0; g < groups; ++g) begin[g + 1] += begin[g];
  entries.resize(group.size());
  std::vector<int64_t> next(begin.begin(), begin.end() - 1);
  for (size_t b = 0; b < group.size(); ++b) entries[next[group[b]]++] = static_cast<int64_t>(b);
}

// Entries with equal key (and value) offsets are one group, in order of first appearance.
void group_entries(const PartitaProblem& p, std::vector<int64_t>& entries, std::vector<int64_t>& begin) {
  std::map<std::pair<int64_t, int64_t>, int64_t> number;
  std::vector<int64_t> group(static_cast<size_t>(p.B));
  for (int64_t b = 0; b < p.B; ++b) {
    const std::pair<int64_t, int64_t> where{p.key.offset[b], p.value.data ? p.value.offset[b] : 0};
    group[b] = number.emplace(where, static_cast<int64_t>(number.size())).first->second;
  }
  sort_entries(group, static_cast<int64_t>(number.size()), entries, begin);
}

// Keys the rows of a task can see, by their intervals: how heavy it is.
int64_t estimate(const PartitaProblem& p, const PlanStorage& s, const Task& t) {
  if (!p.start.data && !p.stop.data) return t.rows * (t.key_end - t.key_begin);
  int64_t work = 0;
  for (int64_t f = t.first; f < t.first + t.rows; ++f) {
    const int64_t b = s.entries[s.begin[t.group] + f / p.Q], i = f % p.Q;
    int64_t lo = t.key_begin, hi = t.key_end;
    if (p.start.data)
      lo = std::max<int64_t>(lo, static_cast<int32_t*>(p.start.data)[p.start.offset[b] + i * p.start.row]);
    if (p.stop.data) hi = std::min<int64_t>(hi, static_cast<int32_t*>(p.stop.data)[p.stop.offset[b] + i * p.stop.row]);
    work += std::max<int64_t>(0, hi - lo);
  }
  return work;
}

// Where exact rows begin their key blocks: with the first key they see, so that hidden keys before it move nothing. Of
// the row after one of the same entry and segment, the search goes on where that one's ended.
class Origins {
 public:
  explicit Origins(const PartitaProblem& p)
      : p_(p), any_(p.exact && (p.start.data || p.mask.data || p.query_segment.data)) {}
  bool any() const { return any_; }

  int64_t operator()(int64_t b, int64_t i) {
    const int64_t start = p_.start.data ? number(p_.start, b, i) : 0;
    const int64_t stop = p_.stop.data ? std::min(p_.K, number(p_.stop, b, i)) : p_.K;
    const int64_t segment = p_.query_segment.data ? number(p_.query_segment, b, i) : 0;
    int64_t key = std::max<int64_t>(0, start);
    const bool again = !p_.mask.data && b == entry_ && segment == segment_ && key == start_;
    start_ = key;
    entry_ = b;
    segment_ = segment;
    if (again) key = found_;
    while (key < stop && !seen(b, i, key, segment)) ++key;
    return found_ = key;
  }

 private:
  static int64_t number(const PartitaOperand& o, int64_t b, int64_t i) {
    return static_cast<const int32_t*>(o.data)[o.offset[b] + i * o.row];
  }
  bool seen(int64_t b, int64_t i, int64_t key, int64_t segment) const {
    if (p_.query_segment.data &&
        static_cast<const int32_t*>(p_.key_segment.data)[p_.key_segment.offset[b] + key] != segment)
      return false;
    if (!p_.mask.data) return true;
    const int64_t at = p_.mask.offset[b] + i * p_.mask.row + (p_.mask.col ? key : 0);
    return static_cast<const uint8_t*>(p_.mask.data)[at] != 0;
  }

  const PartitaProblem& p_;
  bool any_;
  int64_t entry_ = -1, start_ = 0, segment_ = 0, found_ = 0;
};

// Rows [first, first + rows) of a group's flat row list.
struct RowBlock {
  int64_t group, first, rows, origin;
};

// Row blocks whose rows begin their key blocks with one key. Of a row that sees nothing any origin will do.
std::vector<RowBlock> split_by_origin(const PartitaProblem& p, const PlanStorage& s, std::vector<RowBlock> blocks) {
  Origins origins(p);
  if (!origins.any()) return blocks;
  std::vector<RowBlock> out;
  for (const RowBlock& block : blocks) {
    RowBlock part{block.group, block.first, 0, -1};
    for (int64_t f = block.first; f < block.first + block.rows; ++f, ++part.rows) {
      const int64_t found = origins(s.entries[s.begin[block.group] + f / p.Q], f % p.Q);
      const int64_t origin = found < p.K ? found : part.origin;
      if (part.origin >= 0 && origin != part.origin) {
        out.push_back(part);
        part = {block.group, f, 0, -1};
      }
      part.origin = origin;
    }
    out.push_back(part);
  }
  for (RowBlock& block : out) block.origin = std::max<int64_t>(0, block.origin);
  return out;
}

// Large blocks read each key block often; small ones share the work out. Many groups: a group to a thread.
std::vector<RowBlock> cut_rows(const PartitaProblem& p, const Tuning& tuning, int64_t threads,
                               const std::vector<int64_t>& begin) {
  const int64_t groups = static_cast<int64_t>(begin.size()) - 1, total = p.B * p.Q;
  int64_t size = groups >= 4 * threads ? 512 : std::min<int64_t>(256, ceil_div(total, 8 * threads));
  if (tuning.columns) size = ceil_div(total, 4 * threads);
  size = std::max(size, tuning.tile);
  std::vector<RowBlock> blocks;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t members = begin[g + 1] - begin[g];
    const bool whole_entries = 2 * p.Q < size;  // short entries share one block
    const int64_t span = whole_entries ? members * p.Q : p.Q, spans = whole_entries ? 1 : members;
    for (int64_t m = 0; m < spans; ++m) {
      const int64_t cuts = ceil_div(span, size);
      for (int64_t c = 0; c < cuts; ++c) {
        const int64_t a = span * c / cuts, b = span * (c + 1) / cuts;
        blocks.push_back({g, m * span + a, b - a, 0});
      }
    }
  }
  return blocks;
}

}  // namespace

Plan make_plan(const PartitaProblem& p, const Tuning& tuning, PlanStorage& s) {
  group_entries(p, s.entries, s.begin);
  const int64_t groups = static_cast<int64_t>(s.begin.size()) - 1, threads = std::max<int32_t>(1, p.threads);
  // Sums of columns are sums of row blocks, and exact ones do not know the number of threads.
  const int64_t sharing = p.exact && tuning.columns ? EXACT_THREADS : threads;
  const std::vector<RowBlock> row_blocks = split_by_origin(p, s, cut_rows(p, tuning, sharing, s.begin));
  int64_t widest = 0;
  bool shared = false, moved = false;  // a group of several row blocks; an origin that is not 0
  for (size_t i = 0; i < row_blocks.size(); ++i) {
    widest = std::max(widest, row_blocks[i].rows);
    shared = shared || (i && row_blocks[i].group == row_blocks[i - 1].group);
    moved = moved || row_blocks[i].origin > 0;
  }

  const int64_t count = static_cast<int64_t>(row_blocks.size()), blocks = ceil_div(p.K, tuning.keys);
  int64_t splits = 1;
  if (count > 0 && count < 2 * threads && !tuning.columns && !p.exact)
    splits = std::max<int64_t>(1, std::min(ceil_div(4 * threads, count), blocks / 2));

  Plan plan{};
  plan.prepacked = splits == 1 && shared && !moved;
  const int64_t limit = 128 << 20,
                per_wave =
                    plan.prepacked ? std::max<int64_t>(1, limit / std::max<int64_t>(1, tuning.packed_bytes)) : groups;
  size_t next = 0;
  for (int64_t g = 0; g < groups; g += per_wave) {
    const int64_t end = std::min(groups, g + per_wave), first = static_cast<int64_t>(s.task.size());
    for (; next < row_blocks.size() && row_blocks[next].group < end; ++next) {
      const RowBlock& block = row_blocks[next];
      if (splits > 1) s.merge.push_back({block.group, block.first, block.rows, plan.partial_rows, splits});
      for (int64_t k = 0; k < splits; ++k) {
        Task t{block.group, block.first, block.rows, 0, p.K, -1, 0, static_cast<int64_t>(next), block.origin};
        if (splits > 1) {
          t.key_begin = blocks * k / splits * tuning.keys;
          t.key_end = std::min(p.K, blocks * (k + 1) / splits * tuning.keys);
          t.partial = plan.partial_rows;
          plan.partial_rows += block.rows;
        }
        t.work = estimate(p, s, t);
        s.task.push_back(t);
      }
    }
    // The heavy ones first, so that no thread is left with one at the end.
    std::stable_sort(s.task.begin() + first, s.task.end(),
                     [](const Task& a, const Task& b) { return a.work > b.work; });
    s.wave.push_back({g, end, first, static_cast<int64_t>(s.task.size())});
  }

  plan.groups = groups;
  plan.rows = widest;
  plan.threads =
      plan.prepacked ? threads : std::max<int64_t>(1, std::min(threads, static_cast<int64_t>(s.task.size())));
  plan.row_blocks = count;
  plan.waves = static_cast<int64_t>(s.wave.size());
  plan.merges = static_cast<int64_t>(s.merge.size());
  plan.entries = s.entries.data();
  plan.begin = s.begin.data();
  plan.task = s.task.data();
  plan.wave = s.wave.data();
  plan.merge = s.merge.data();
  return plan;
}

BackwardPlan make_backward_plan(const PartitaProblem& p, const PartitaGradients& g, const Tuning& tuning,
                                BackwardStorage& s) {
  sort_entries(std::vector<int64_t>(g.group, g.group + p.B), g.groups, s.entries, s.entry_begin);
  const int64_t threads = p.exact ? EXACT_THREADS : std::max<int32_t>(1, p.threads), groups = g.groups;
  if (Origins origins(p); origins.any())
    for (int64_t i = 0; i < p.B * p.Q; ++i) s.origin.push_back(std::min(p.K, origins(i / p.Q, i % p.Q)));
  const int64_t segment = EXACT_KEYS / tuning.keys * tuning.keys;  // exact sums over keys are sums of these
  const int64_t segments = p.exact ? std::max<int64_t>(1, ceil_div(p.K, segment)) : 1;
  bool in_turn = segments > 1;
  // Few groups: cut rows or keys, whichever needs less memory for partial sums (key, value against query).
  int64_t rows = 1, keys = 1;
  const bool rows_alone = g.bias.data && g.bias_is_shared, keys_alone = g.bias_col != nullptr;
  if (rows_alone) {
    rows = std::max<int64_t>(1, std::min(2 * threads, p.Q / tuning.tile));
    keys = segments;
  } else if (p.exact) {
    keys = segments;
    in_turn = in_turn && (groups >= 2 * threads || !s.origin.empty() || keys_alone);
    const int64_t most =
        std::min(EXACT_PARTS / std::max<int64_t>(1, groups * p.K * (p.D + p.V)), p.Q / (4 * tuning.tile));
    if (groups < 2 * threads && (segments == 1 || in_turn) && !keys_alone)
      rows = std::max<int64_t>(1, std::min(ceil_div(2 * threads, groups), most));
  } else if (groups > 0 && groups % threads != 0 && groups < 4 * threads) {
    const int64_t want = ceil_div(4 * threads, groups);
    const int64_t most_rows = std::max<int64_t>(1, p.Q / (4 * tuning.tile)),
                  most_keys = std::max<int64_t>(1, ceil_div(p.K, tuning.keys));
    const bool cut_rows = !keys_alone && groups * p.K * (p.D + p.V) < p.B * p.Q * p.D;
    if (cut_rows)
      rows = std::min(want, most_rows);
    else
      keys = std::min(want, most_keys);
    // Where that axis is too short, the other one helps.
    if (cut_rows && rows < threads)
      keys = std::min(ceil_div(want, rows), most_keys);
    else if (!cut_rows && !keys_alone && keys < threads)
      rows = std::min(ceil_div(want, keys), most_rows);
  }
  const int64_t blocks = ceil_div(p.K, tuning.keys);
  s.begin.push_back(0);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t k = 0; k < keys; ++k) {
        BackwardTask task{group, p.Q * r / rows, p.Q * (r + 1) / rows, blocks * k / keys * tuning.keys, 0, r, k};
        task.key_end = std::min(p.K, blocks * (k + 1) / keys * tuning.keys);
        if (p.exact) task.key_begin = k * segment, task.key_end = std::min(p.K, (k + 1) * segment);
        s.task.push_back(task);
        // A bias shared by entries: one thread has a row range of all of them, so its sums have one order.
        if ((!rows_alone || group + 1 == groups) && ((!rows_alone && !in_turn) || k + 1 == keys))
          s.begin.push_back(static_cast<int64_t>(s.task.size()));
      }
  if (p.stop.data && keys > 1 && !rows_alone && !in_turn)  // causal: early keys are seen by most rows
    std::stable_sort(s.task.begin(), s.task.end(),
                     [](const BackwardTask& a, const BackwardTask& b) { return a.key_begin < b.key_begin; });
  if (p.stop.data && rows > 1 && keys == 1 && !rows_alone)
    std::stable_sort(s.task.begin(), s.task.end(),
                     [](const BackwardTask& a, const BackwardTask& b) { return a.row > b.row; });

  BackwardPlan plan{};
  plan.groups = groups;
  plan.lists = static_cast<int64_t>(s.begin.size()) - 1;
  plan.threads = std::max<int64_t>(1, std::min<int64_t>(p.threads, plan.lists));
  plan.row_splits = rows;
  plan.key_splits = in_turn ? 1 : keys;
  plan.in_turn = in_turn;
  plan.origin = s.origin.empty() ? nullptr : s.origin.data();
  plan.entries = s.entries.data();
  plan.entry_begin = s.entry_begin.data();
  plan.begin = s.begin.data();
  plan.task = s.task.data();
  return plan;
}

}  // namespace partita
