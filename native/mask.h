// Which keys a row may see: `Row` for one query row, `visible_columns` for the rows of a register tile against
// a key block, `mask_row` writes -inf over the scores of what is invisible.
#pragma once
#include "exp.h"
#include "packing.h"

namespace partita {
namespace PARTITA_ISA {

struct Row {
  int64_t entry, index, out;  // batch entry, row in it, entry * Q + index
  int64_t start, stop;
  int64_t target;  // -1 where absent
  int64_t skip;    // the key this row leaves out; -1 where absent
  const char* bias;
  const uint8_t* mask;
  const int32_t* segments;
  int32_t segment;
};

template <class T>
PARTITA_INLINE const T* row_at(const PartitaOperand& o, int64_t entry, int64_t index) {
  return static_cast<const T*>(o.data) + o.offset[entry] + index * o.row;
}

PARTITA_INLINE Row make_row(const PartitaProblem& p, int64_t entry, int64_t index) {
  Row r;
  r.entry = entry;
  r.index = index;
  r.out = entry * p.Q + index;
  const int64_t start = p.start.data ? *row_at<int32_t>(p.start, entry, index) : 0;
  const int64_t stop = p.stop.data ? *row_at<int32_t>(p.stop, entry, index) : p.K;
  r.start = start > 0 ? start : 0;
  r.stop = stop < p.K ? stop : p.K;
  if (r.stop < r.start) r.stop = r.start;
  r.target = p.target.data ? *row_at<int64_t>(p.target, entry, index) : -1;
  r.skip = p.skip.data ? *row_at<int32_t>(p.skip, entry, index) : -1;
  r.bias = nullptr;
  if (p.bias.data) {
    const int64_t at = p.bias.offset[entry] + index * p.bias.row;
    r.bias = static_cast<const char*>(p.bias.data) + at * static_cast<int64_t>(dtype_size(p.bias_dtype));
  }
  r.mask = p.mask.data ? row_at<uint8_t>(p.mask, entry, index) : nullptr;
  r.segments = p.key_segment.data ? row_at<int32_t>(p.key_segment, entry, 0) : nullptr;
  r.segment = p.query_segment.data ? *row_at<int32_t>(p.query_segment, entry, index) : 0;
  return r;
}

// Visible to this row, bias aside.
inline bool visible(const PartitaProblem& p, const Row& r, int64_t j) {
  return j >= r.start && j < r.stop && j != r.skip && (!r.segments || r.segments[j] == r.segment) &&
         (!r.mask || r.mask[p.mask.col ? j : 0]);
}

struct ColumnRange {
  int begin, end;  // columns of the key block, multiples of a panel
};

struct KeySpan {                               // of keys that some rows see, by their intervals
  int64_t lo = INT64_MAX, hi = 0;              // any of them
  int64_t inner_lo = 0, inner_hi = INT64_MAX;  // all of them
  int64_t first = INT64_MAX, last = -1;        // the keys they leave out lie between these
  void add(const KeySpan& s) {
    lo = s.lo < lo ? s.lo : lo;
    hi = s.hi > hi ? s.hi : hi;
    inner_lo = s.inner_lo > inner_lo ? s.inner_lo : inner_lo;
    inner_hi = s.inner_hi < inner_hi ? s.inner_hi : inner_hi;
    first = s.first < first ? s.first : first;
    last = s.last > last ? s.last : last;
  }
};

inline KeySpan key_span(const Row* rows, int64_t m) {
  KeySpan s;
  for (int64_t r = 0; r < m; ++r) {
    const bool some = rows[r].stop > rows[r].start;
    s.add({some ? rows[r].start : INT64_MAX, some ? rows[r].stop : 0, rows[r].start, rows[r].stop, rows[r].skip,
           rows[r].skip});
  }
  return s;
}

struct VisibleColumns {
  int runs = 0;
  int begin = 0, end = 0;         // first and last column of all runs
  int64_t last = 0;               // columns at or past this one are invisible to every row
  ColumnRange unmasked = {0, 0};  // whole vectors that every row sees, bias aside; begin and end where there are none
  bool whole = false;             // that is all of them
};

// Does any row of the tile see a key of [j, end)? Exact for masks; for segments, whether the ranges of ids meet.
inline bool panel_visible(const PartitaProblem& p, const Row* rows, int m, int64_t j, int64_t end) {
  if (rows[0].segments) {
    bool meet = false;
    const int32_t* known = nullptr;
    int32_t low = 0, high = 0;
    for (int r = 0; r < m && !meet; ++r) {
      if (rows[r].segments != known) {
        known = rows[r].segments;
        low = high = known[j];
        for (int64_t i = j; i < end; ++i) {
          low = known[i] < low ? known[i] : low;
          high = known[i] > high ? known[i] : high;
        }
      }
      meet = rows[r].segment >= low && rows[r].segment <= high;
    }
    if (!meet) return false;
  }
  if (!rows[0].mask) return true;
  for (int r = 0; r < m; ++r) {
    if (!p.mask.col) {
      if (rows[r].mask[0]) return true;
      continue;
    }
    uint8_t any = 0;
    for (int64_t i = j; i < end; ++i) any |= rows[r].mask[i];
    if (any) return true;
  }
  return false;
}

// Which panels of the key block [key, end) any of the m rows of a tile can see. `masked`: visibility is more than an
// interval.
template <class A>
inline VisibleColumns visible_columns(const PartitaProblem& p, bool masked, const KeySpan& span, const Row* rows, int m,
                                      int64_t key, int64_t end, ColumnRange* runs) {
  constexpr int P = Shape<A>::PANEL;
  VisibleColumns c;
  const int64_t lo = span.lo < key ? key : span.lo, hi = span.hi > end ? end : span.hi;
  const int64_t inner_lo = span.inner_lo > key ? span.inner_lo : key,
                inner_hi = span.inner_hi < end ? span.inner_hi : end;
  const bool skips = p.skip.data && span.first < end && span.last >= key;
  if (lo >= hi) return c;
  const int first = static_cast<int>((lo - key) / P), last = static_cast<int>((hi - key + P - 1) / P);
  if (!masked) {
    runs[0] = {first * P, last * P};
    c.runs = 1;
  } else {
    for (int q = first; q < last; ++q) {
      const int64_t a = key + q * P, b = a + P < p.K ? a + P : p.K;
      if (!panel_visible(p, rows, m, a, b)) continue;
      if (c.runs && runs[c.runs - 1].end == q * P)
        runs[c.runs - 1].end = (q + 1) * P;
      else
        runs[c.runs++] = {q * P, (q + 1) * P};
    }
    if (!c.runs) return c;
  }
  c.begin = runs[0].begin;
  c.end = runs[c.runs - 1].end;
  c.last = hi - key < c.end ? hi - key : c.end;
  constexpr int W = Vec<A>::W;
  const int64_t from = (inner_lo - key + W - 1) / W * W, to = inner_hi > key ? (inner_hi - key) / W * W : 0;
  c.unmasked.begin = from < c.begin ? c.begin : from > c.end ? c.end : static_cast<int>(from);
  c.unmasked.end = to > c.end ? c.end : static_cast<int>(to);
  if (masked || skips || c.unmasked.end < c.unmasked.begin) c.unmasked = {c.end, c.end};
  c.whole = c.unmasked.begin == c.begin && c.unmasked.end == c.end;
  return c;
}

template <class A>
inline void mask_row(const PartitaProblem& p, const Row& row, int64_t key, int begin, int end, A* s) {
  using V = Vec<A>;
  const A none = neg_inf<A>();
  const int64_t from = row.start - key, to = row.stop - key;
  for (int j = begin; j < end && j < from; ++j) s[j] = none;
  int j = to > begin ? static_cast<int>(to < end ? to : end) : begin;
  for (; j < end && j % V::W; ++j) s[j] = none;
  for (; j < end; j += V::W) V::store(s + j, V::set(none));
  if (row.skip - key >= begin && row.skip - key < end) s[row.skip - key] = none;
  const int64_t stop = p.K - key < end ? p.K - key : end;
  if (row.segments)
    for (int64_t j = begin; j < stop; ++j) s[j] = row.segments[key + j] == row.segment ? s[j] : none;
  if (row.mask) {
    if (p.mask.col)
      for (int64_t j = begin; j < stop; ++j) s[j] = row.mask[key + j] ? s[j] : none;
    else if (!row.mask[0])
      for (int64_t j = begin; j < stop; ++j) s[j] = none;
  }
}

}  // namespace PARTITA_ISA
}  // namespace partita
