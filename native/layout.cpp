// The offset of each field of each structure, as text: "PartitaProblem.B=0 ... PartitaProblem=424 ...". Python has its
// own list of the fields and refuses a library that disagrees with it.
#include <cstdio>
#include <string>

#include "interface.h"

namespace {

struct Field {
  const char* name;
  size_t offset;
};

#define FIELD(structure, field) {#structure "." #field, offsetof(structure, field)}
#define OPERAND(structure, field) \
  FIELD(structure, field.data), FIELD(structure, field.offset), FIELD(structure, field.row), FIELD(structure, field.col)
#define SIZE(structure) {#structure, sizeof(structure)}

#define P(field) FIELD(PartitaProblem, field)
#define S(field) FIELD(PartitaSums, field)
#define G(field) FIELD(PartitaGradients, field)
#define A(field) FIELD(PartitaAttention, field)
#define R(field) FIELD(PartitaSoftmaxRows, field)
#define L(field) FIELD(PartitaLogits, field)
#define C(field) FIELD(PartitaColumns, field)
#define D(field) FIELD(PartitaDivergenceRows, field)
#define K(field) FIELD(PartitaTop, field)
#define E(field) FIELD(PartitaGaps, field)

// clang-format off
constexpr Field FIELDS[] = {
    P(B), P(Q), P(K), P(D), P(V), P(dtype), P(bias_dtype), P(threads), P(exact), P(softcap),
    OPERAND(PartitaProblem, query), OPERAND(PartitaProblem, key), OPERAND(PartitaProblem, value),
    OPERAND(PartitaProblem, scale), OPERAND(PartitaProblem, bias), OPERAND(PartitaProblem, target),
    OPERAND(PartitaProblem, start), OPERAND(PartitaProblem, stop), OPERAND(PartitaProblem, query_segment),
    OPERAND(PartitaProblem, key_segment), OPERAND(PartitaProblem, mask), OPERAND(PartitaProblem, skip),
    SIZE(PartitaProblem),
    S(peak), S(mass), S(first), S(second), S(moment), S(target_score), S(count), S(rank), S(col_peak), S(col_mass),
    S(stats), S(mean), S(forward_only), S(moment_offset), S(moment_row), S(argmax), SIZE(PartitaSums),
    G(group), G(groups), G(peak), G(mass), G(first), G(second), G(moment), G(target), G(query), G(scale), G(key),
    G(value), G(bias_row), G(bias_col), OPERAND(PartitaGradients, bias), G(bias_is_shared), G(col_peak), G(col_mass),
    G(rounded), SIZE(PartitaGradients),
    A(scale), A(query), A(key), A(value), A(mean), A(stats), A(count), A(first), SIZE(PartitaAttention),
    R(rows), R(cols), R(row), R(dtype), R(threads), R(gradient), R(unused), R(logits), R(bias), R(target), R(weight),
    R(peak), R(mass), R(target_score), SIZE(PartitaSoftmaxRows),
    L(rows), L(classes), L(dim), L(weight_row), L(logits_row), L(dtype), L(threads), L(input), L(weight), L(logits),
    SIZE(PartitaLogits),
    C(peak), C(weight), C(slot), C(slots), C(sums), SIZE(PartitaColumns),
    D(rows), D(cols), D(p_row), D(q_row), D(record_row), D(dtype), D(threads), D(kind), D(p_gradient), D(q_gradient),
    D(unused), D(beta), D(p), D(q), D(p_bias), D(q_bias), D(p_start), D(p_stop), D(q_start), D(q_stop), D(weight),
    D(record), SIZE(PartitaDivergenceRows),
    K(k), K(score), K(index), SIZE(PartitaTop),
    E(edges), E(edge), E(count), SIZE(PartitaGaps),
};
// clang-format on

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* partita_layout() {
  static const std::string text = [] {
    std::string s;
    for (const Field& f : FIELDS) s += std::string(f.name) + "=" + std::to_string(f.offset) + " ";
    return s;
  }();
  return text.c_str();
}
