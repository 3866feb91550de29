// The C interface: picks the instruction set once, plans a call, runs it.
#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels.h"
#include "plan.h"

namespace partita {
namespace {

struct Choice {
  const Kernels* kernels;
  const char* name;
};

Choice choose() {
  const char* wanted = std::getenv("PARTITA_ISA");
  const bool any = !wanted || !*wanted;
  (void)any;
#ifdef PARTITA_HAS_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx512 && (any || !std::strcmp(wanted, "avx512"))) return {&avx512::kernels, "avx512"};
  if (avx2 && (any || std::strcmp(wanted, "baseline"))) return {&avx2::kernels, "avx2"};
#endif
  return {&baseline::kernels, "baseline"};
}

const Choice& choice() {
  static const Choice c = choose();
  return c;
}

}  // namespace
}  // namespace partita

#define PARTITA_API extern "C" __attribute__((visibility("default")))

using namespace partita;

// Raised with every change of the structures, so that Python never talks to a library of another version.
PARTITA_API int32_t partita_version() { return 5; }

PARTITA_API const char* partita_isa() { return choice().name; }

// 0: done. 1: done, and a result is not finite. 2: out of memory.
PARTITA_API int32_t partita_reduce(const PartitaProblem* p, const PartitaSums* to) {
  try {
    Storage storage;
    Tuning tuning = choice().kernels->tuning(*p);
    tuning.columns = to->col_peak != nullptr;
    const Plan plan = make_plan(*p, tuning, storage);
    return choice().kernels->reduce(*p, plan, *to);
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

PARTITA_API int32_t partita_reduce_backward(const PartitaProblem* p, const PartitaGradients* g) {
  try {
    BackwardStorage storage;
    const BackwardPlan plan = make_backward_plan(*p, *g, choice().kernels->backward_tuning(*p), storage);
    return choice().kernels->backward(*p, plan, *g);
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

PARTITA_API int32_t partita_rows(const PartitaRows* r) { return choice().kernels->rows(*r); }

PARTITA_API int32_t partita_logits(const PartitaLogits* l) { return choice().kernels->logits(*l); }

PARTITA_API int32_t partita_tally(const PartitaTally* t) {
  choice().kernels->tally(*t);
  return FINITE;
}
