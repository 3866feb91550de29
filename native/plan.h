// How a call is cut into tasks: what the planner gives to the kernels.
#pragma once
#include "interface.h"

namespace partita {

// Rows [first, first + rows) of a group's flat row list (entry-major, then row) against keys [key_begin, key_end).
struct Task {
  int64_t group, first, rows, key_begin, key_end;
  int64_t partial;  // where its unfinished sums go, in rows; -1 where it finishes its rows itself
  int64_t work;
  int64_t row_block;  // number of its row block
  int64_t origin;     // the first key of its first key block
};

// One row block whose keys were split: `splits` tasks from `task` on, merged in that order.
struct Merge {
  int64_t group, first, rows, partial, splits;
};

// Groups [group, group_end) are packed together, then tasks [task, task_end) run.
struct Wave {
  int64_t group, group_end, task, task_end;
};

// How a call is cut. Groups are entries that share key and value. Made once per call, outside the hot code.
struct Plan {
  int64_t groups, waves, merges, partial_rows, rows;  // rows: of the largest task
  int64_t row_blocks;
  int64_t threads;         // that have something to do
  bool prepacked;          // packed keys are shared by several tasks; their first key is 0
  const int64_t* entries;  // (B) entry numbers, group by group
  const int64_t* begin;    // (groups + 1) where each group starts in `entries`
  const Task* task;
  const Wave* wave;
  const Merge* merge;
};

// Backward: rows [row, row_end) of every entry of a group against keys [key_begin, key_end).
struct BackwardTask {
  int64_t group, row, row_end, key_begin, key_end;
  int64_t row_split, key_split;  // which partial sums it adds to
};

// Tasks [begin[i], begin[i + 1]) run in order on one thread; threads take such lists as they come.
struct BackwardPlan {
  int64_t groups, lists, row_splits, key_splits;
  bool in_turn;  // key splits are one list, each added to the first when it is done: two sums, not one for each
  const int64_t* origin;  // (B * Q) the first key of a row's first key block; null: 0
  int64_t threads;        // that have something to do
  const int64_t *entries, *entry_begin;
  const int64_t* begin;
  const BackwardTask* task;
};

struct Tuning {
  int64_t tile, keys;    // rows of a register tile, keys of a key block
  int64_t packed_bytes;  // of one group, when prepacked
  bool columns;          // few row blocks: each has sums of all columns
};

}  // namespace partita
