// Cutting a call into tasks. Compiled once, for every instruction set.
#pragma once
#include <vector>

#include "plan.h"

namespace partita {

// What a plan points into.
struct PlanStorage {
  std::vector<int64_t> entries, begin;
  std::vector<Task> task;
  std::vector<Wave> wave;
  std::vector<Merge> merge;
};

struct BackwardStorage {
  std::vector<int64_t> entries, entry_begin, begin, origin;
  std::vector<BackwardTask> task;
};

Plan make_plan(const PartitaProblem& p, const Tuning& tuning, PlanStorage& storage);

BackwardPlan make_backward_plan(const PartitaProblem& p, const PartitaGradients& g, const Tuning& tuning,
                                BackwardStorage& storage);

}  // namespace partita
