// The kernels of one instruction set, as the dispatcher sees them. `plan` has been made with the tuning of the same
// set.
#pragma once
#include "interface.h"
#include "plan.h"

namespace partita {

enum Outcome : int32_t { FINITE = 0, NOT_FINITE = 1, NO_MEMORY = 2 };

struct Kernels {
  Tuning (*forward_tuning)(const PartitaProblem&);
  int32_t (*forward)(const PartitaProblem&, const Plan&, const PartitaSums&);
  Tuning (*backward_tuning)(const PartitaProblem&);
  int32_t (*backward)(const PartitaProblem&, const BackwardPlan&, const PartitaGradients&);
  int32_t (*softmax_rows)(const PartitaSoftmaxRows&);
  int32_t (*logits)(const PartitaLogits&);
  int32_t (*input_gradient)(const PartitaLogits&);
  int32_t (*weight_gradient)(const PartitaLogits&);
  int32_t (*received)(const PartitaProblem&, const PartitaColumns&);
  int32_t (*divergence_rows)(const PartitaDivergenceRows&);
  int32_t (*top)(const PartitaProblem&, const PartitaTop&);
  int32_t (*gaps)(const PartitaProblem&, const PartitaGaps&);
};

#define PARTITA_DECLARE(isa)                                                                   \
  namespace isa {                                                                              \
  Tuning forward_tuning(const PartitaProblem&);                                                \
  int32_t forward(const PartitaProblem&, const Plan&, const PartitaSums&);                     \
  Tuning backward_tuning(const PartitaProblem&);                                               \
  int32_t backward(const PartitaProblem&, const BackwardPlan&, const PartitaGradients&);       \
  int32_t softmax_rows(const PartitaSoftmaxRows&);                                             \
  int32_t logits(const PartitaLogits&);                                                        \
  int32_t input_gradient(const PartitaLogits&);                                                \
  int32_t weight_gradient(const PartitaLogits&);                                               \
  int32_t received(const PartitaProblem&, const PartitaColumns&);                              \
  int32_t divergence_rows(const PartitaDivergenceRows&);                                       \
  int32_t top(const PartitaProblem&, const PartitaTop&);                                       \
  int32_t gaps(const PartitaProblem&, const PartitaGaps&);                                     \
  constexpr Kernels kernels = {                                                                \
      forward_tuning, forward,         backward_tuning, backward,        softmax_rows, logits, \
      input_gradient, weight_gradient, received,        divergence_rows, top,          gaps};  \
  }
PARTITA_DECLARE(baseline)
PARTITA_DECLARE(avx2)
PARTITA_DECLARE(avx512)
PARTITA_DECLARE(avx512_bf16)
PARTITA_DECLARE(neon)
PARTITA_DECLARE(neon_bf16)

}  // namespace partita
