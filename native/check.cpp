// The C interface driven without Python and torch, against sums in long double: for processors that have to be
// emulated. Here the plain pass, forward and backward, and the classifier; what check.h names last has the rest.
//
//   cmake -B build -S native -DPARTITA_CHECK=ON && cmake --build build && build/partita_check
#include <cstring>

#include "check.h"

namespace {

// Plain sums of one row in type T: what the kernel streams, with all scores at hand.
template <class T>
struct Row {
  T peak, mass, first, target_score;
  std::vector<T> score, moment;
};

template <class T, class A>
Row<T> plain_row(const A* q, const std::vector<A>& key, const std::vector<A>& value, int64_t seen, int64_t D, int64_t V,
                 T scale, int64_t target) {
  Row<T> r{-std::numeric_limits<T>::infinity(), 0, 0, 0, std::vector<T>(seen), std::vector<T>(V)};
  for (int64_t j = 0; j < seen; ++j) {
    T s = 0;
    for (int64_t d = 0; d < D; ++d) s += scale * static_cast<T>(q[d]) * static_cast<T>(key[j * D + d]);
    r.score[j] = s;
    r.peak = std::max(r.peak, s);
  }
  for (int64_t j = 0; j < seen; ++j) {
    const T c = r.score[j] - r.peak, e = std::exp(c);
    r.mass += e;
    r.first += e * c;
    for (int64_t v = 0; v < V; ++v) r.moment[v] += e * static_cast<T>(value[j * V + v]);
  }
  r.target_score = target < seen ? r.score[target] : -std::numeric_limits<T>::infinity();
  return r;
}

// Long, because it is one call of each kind in order: operands, the call, every result next to the plain formula.
template <class A>
void check_pass(int64_t Q, int64_t K, int64_t D, int64_t V, bool causal) {
  std::printf("pass, %s, %d x %d, %d features, %d values%s\n", sizeof(A) == 4 ? "float32" : "float64", int(Q), int(K),
              int(D), int(V), causal ? ", causal" : "");
  std::mt19937 source(7);
  std::vector<A> query = drawn<A>(source, Q * D), key = drawn<A>(source, K * D), value = drawn<A>(source, K * V);
  A scale = static_cast<A>(1.5 / std::sqrt(double(D)));
  const int64_t zero = 0;
  std::vector<int64_t> target(Q);
  std::vector<int32_t> stop(Q);
  for (int64_t i = 0; i < Q; ++i) {
    stop[i] = static_cast<int32_t>(causal ? std::min(i + 1, K) : K);
    target[i] = i % stop[i];
  }
  PartitaProblem p{};
  p.B = 1, p.Q = Q, p.K = K, p.D = D, p.V = V, p.threads = 1;
  p.dtype = p.bias_dtype = sizeof(A) == 4 ? PARTITA_FLOAT32 : PARTITA_FLOAT64;
  p.query = {query.data(), &zero, D, 1};
  p.key = {key.data(), &zero, D, 1};
  p.value = {value.data(), &zero, V, 1};
  p.scale = {&scale, &zero, 0, 1};
  p.target = {target.data(), &zero, 1, 1};
  if (causal) p.stop = {stop.data(), &zero, 1, 1};
  std::vector<double> peak(Q);
  std::vector<A> mass(Q), first(Q), second(Q), moment(Q * V), score(Q), count(Q);
  std::vector<int64_t> rank(Q);
  PartitaSums to{};
  to.peak = peak.data(), to.mass = mass.data(), to.first = first.data(), to.second = second.data();
  to.moment = moment.data(), to.target_score = score.data(), to.count = count.data(), to.rank = rank.data();
  to.moment_offset = &zero, to.moment_row = V;
  failures += partita_forward(&p, &to) != 0;

  // upstream gradients, and the line every backend knows: ds_j = e_j (g_mass + g_first (1 + c_j) + <g_moment, v_j>)
  std::vector<A> g_mass = drawn<A>(source, Q), g_first = drawn<A>(source, Q), g_moment = drawn<A>(source, Q * V);
  std::vector<A> dq(Q * D), dk(K * D), dv(K * V), ds(Q);
  std::vector<Exact> dk_exact(K * D), dv_exact(K * V);
  std::vector<A> dk_plain(K * D), dv_plain(K * V);
  PartitaGradients g{};
  g.group = &zero, g.groups = 1;
  g.peak = peak.data(), g.mass = g_mass.data(), g.first = g_first.data(), g.moment = g_moment.data();
  g.query = dq.data(), g.scale = ds.data(), g.key = dk.data(), g.value = dv.data();
  failures += partita_backward(&p, &g) != 0;

  Error<A> log_z, entropy, mean, at, query_gradient, key_gradient, value_gradient;
  int64_t wrong = 0;
  const auto gradients = [&](auto one, const auto& row, int64_t i, auto& to_query, auto& to_key, auto& to_value) {
    using T = decltype(one);
    // relative to the kernel's own peak, which upstream gradients are about
    for (size_t j = 0; j < row.score.size(); ++j) {
      const T c = row.score[j] - static_cast<T>(peak[i]), e = std::exp(c);
      T inner = static_cast<T>(g_mass[i]) + static_cast<T>(g_first[i]) * (1 + c);
      for (int64_t v = 0; v < V; ++v) {
        inner += static_cast<T>(g_moment[i * V + v]) * static_cast<T>(value[j * V + v]);
        to_value[j * V + v] += e * static_cast<T>(g_moment[i * V + v]);
      }
      for (int64_t d = 0; d < D; ++d) {
        to_query[d] += e * inner * static_cast<T>(scale) * static_cast<T>(key[j * D + d]);
        to_key[j * D + d] += e * inner * static_cast<T>(scale) * static_cast<T>(query[i * D + d]);
      }
    }
  };
  for (int64_t i = 0; i < Q; ++i) {
    const auto exact = plain_row<Exact>(&query[i * D], key, value, stop[i], D, V, Exact(scale), target[i]);
    const auto plain = plain_row<A>(&query[i * D], key, value, stop[i], D, V, scale, target[i]);
    log_z.add(exact.peak + std::log(exact.mass), peak[i] + std::log(Exact(mass[i])), plain.peak + std::log(plain.mass));
    entropy.add(std::log(exact.mass) - exact.first / exact.mass, std::log(Exact(mass[i])) - Exact(first[i]) / mass[i],
                std::log(plain.mass) - plain.first / plain.mass);
    for (int64_t v = 0; v < V; ++v)
      mean.add(exact.moment[v] / exact.mass, Exact(moment[i * V + v]) / mass[i], plain.moment[v] / plain.mass);
    at.add(exact.target_score, score[i], plain.target_score);
    int64_t above = 0;
    for (Exact s : exact.score) above += s > exact.target_score;
    wrong += rank[i] != above || count[i] != stop[i];
    std::vector<Exact> query_exact(D);
    std::vector<A> query_plain(D);
    gradients(Exact(0), exact, i, query_exact, dk_exact, dv_exact);
    gradients(A(0), plain, i, query_plain, dk_plain, dv_plain);
    for (int64_t d = 0; d < D; ++d) query_gradient.add(query_exact[d], dq[i * D + d], query_plain[d]);
  }
  for (size_t k = 0; k < dk.size(); ++k) key_gradient.add(dk_exact[k], dk[k], dk_plain[k]);
  for (size_t k = 0; k < dv.size(); ++k) value_gradient.add(dv_exact[k], dv[k], dv_plain[k]);
  log_z.hold("log Z", K);
  entropy.hold("entropy", K);
  mean.hold("E[value]", K);
  at.hold("score of the target", D);
  query_gradient.hold("gradient of the query", K);
  key_gradient.hold("gradient of the key", Q);
  value_gradient.hold("gradient of the value", Q);
  expect("ranks and counts", wrong);
}

template <class A>
void check_classifier(int64_t rows, int64_t classes, int64_t dim) {
  std::printf("classifier, %s, %d rows, %d classes\n", sizeof(A) == 4 ? "float32" : "float64", int(rows), int(classes));
  std::mt19937 source(11);
  std::vector<A> input = drawn<A>(source, rows * dim), weight = drawn<A>(source, classes * dim), logits(rows * classes);
  const int32_t dtype = sizeof(A) == 4 ? PARTITA_FLOAT32 : PARTITA_FLOAT64;
  PartitaLogits l{rows, classes, dim, dim, classes, dtype, 1, input.data(), weight.data(), logits.data()};
  failures += partita_logits(&l) != 0;
  Error<A> product, gradient;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < classes; ++c) {
      Exact exact = 0;
      A plain = 0;
      for (int64_t d = 0; d < dim; ++d) {
        exact += Exact(input[i * dim + d]) * weight[c * dim + d];
        plain += input[i * dim + d] * weight[c * dim + d];
      }
      product.add(exact, logits[i * classes + c], plain);
    }
  std::vector<A> given = logits, mass(rows), score(rows), share = drawn<A>(source, rows);
  std::vector<double> wide_peak(rows);
  std::vector<int64_t> target(rows);
  for (int64_t i = 0; i < rows; ++i) target[i] = (5 * i) % classes;
  PartitaSoftmaxRows r{
      rows,          classes,      classes,          dtype,       1,           1, 0, logits.data(), nullptr,
      target.data(), share.data(), wide_peak.data(), mass.data(), score.data()};
  failures += partita_softmax_rows(&r) != 0;
  for (int64_t i = 0; i < rows; ++i) {
    Exact top = -1e300, sum = 0;
    A narrow = 0;
    for (int64_t c = 0; c < classes; ++c) top = std::max(top, Exact(given[i * classes + c]));
    for (int64_t c = 0; c < classes; ++c) {
      sum += std::exp(given[i * classes + c] - top);
      narrow += std::exp(given[i * classes + c] - static_cast<A>(top));
    }
    for (int64_t c = 0; c < classes; ++c) {
      const Exact one = target[i] == c;
      const Exact exact = share[i] * (std::exp(given[i * classes + c] - top) / sum - one);
      const A plain =
          share[i] * (std::exp(given[i * classes + c] - static_cast<A>(top)) / narrow - static_cast<A>(one));
      gradient.add(exact, logits[i * classes + c], plain);
    }
  }
  product.hold("logits", dim);
  gradient.hold("gradient of the weighted loss", classes);
}

// bfloat16 numbers, as they are stored and in float32.
struct Halves {
  std::vector<uint16_t> stored;
  std::vector<float> wide;
  Halves(std::mt19937& source, size_t n) : stored(n), wide(drawn<float>(source, n)) {
    for (size_t i = 0; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, &wide[i], 4);
      stored[i] = static_cast<uint16_t>(bits >> 16);
      bits &= 0xffff0000u;
      std::memcpy(&wide[i], &bits, 4);
    }
  }
};

// The three products of a cross entropy over classes, of bfloat16 numbers: sums in float32.
void check_products_of_pairs(int64_t rows, int64_t classes, int64_t dim) {
  std::printf("products of pairs, %d rows, %d classes\n", int(rows), int(classes));
  std::mt19937 source(13);
  const int64_t stride = classes + 3;  // of logits; their gradients are stored in the place of each row
  const Halves input(source, rows * dim), weight(source, classes * dim), p(source, rows * 2 * stride);
  std::vector<float> logits(rows * stride), to_input(rows * dim), to_weight = drawn<float>(source, classes * dim);
  const std::vector<float> before = to_weight;
  PartitaLogits l{
      rows, classes, dim, dim, stride, PARTITA_BFLOAT16, 2, input.stored.data(), weight.stored.data(), logits.data()};
  failures += partita_logits(&l) != 0;
  l.logits = const_cast<uint16_t*>(p.stored.data());
  l.input = to_input.data();
  failures += partita_input_gradient(&l) != 0;
  l.input = input.stored.data(), l.weight = to_weight.data();
  failures += partita_weight_gradient(&l) != 0;
  const auto compare = [](const char* what, int64_t n, int64_t m, int64_t terms, const auto& got, const auto& start,
                          const auto& a, const auto& b) {
    Error<float> error;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < m; ++j) {
        float plain = 0;
        Exact exact = 0;
        for (int64_t k = 0; k < terms; ++k) plain += a(i, k) * b(j, k), exact += Exact(a(i, k)) * b(j, k);
        error.add(exact + start(i, j), got(i, j), plain + start(i, j));
      }
    error.hold(what, terms);
  };
  const auto x = [&](int64_t i, int64_t k) { return input.wide[i * dim + k]; };
  const auto w = [&](int64_t c, int64_t k) { return weight.wide[c * dim + k]; };
  const auto at = [&](int64_t i, int64_t c) { return p.wide[i * 2 * stride + c]; };
  const auto none = [](int64_t, int64_t) { return 0.0f; };
  compare("logits", rows, classes, dim, [&](int64_t i, int64_t c) { return logits[i * stride + c]; }, none, x, w);
  compare(
      "gradient of the input", rows, dim, classes, [&](int64_t i, int64_t k) { return to_input[i * dim + k]; }, none,
      at, [&](int64_t k, int64_t c) { return w(c, k); });
  compare(
      "gradient of the weight", classes, dim, rows, [&](int64_t c, int64_t k) { return to_weight[c * dim + k]; },
      [&](int64_t c, int64_t k) { return before[c * dim + k]; }, [&](int64_t c, int64_t i) { return at(i, c); },
      [&](int64_t k, int64_t i) { return x(i, k); });
}

}  // namespace

int main() {
  std::printf("kernels: %s\n", partita_isa());
  check_pass<float>(53, 301, 37, 19, false);
  check_pass<float>(128, 128, 64, 64, true);
  check_pass<float>(1, 1000, 64, 32, false);
  check_pass<double>(29, 173, 21, 11, true);
  check_classifier<float>(37, 501, 45);
  check_classifier<double>(13, 101, 21);
  if (std::strstr(partita_isa(), "bf16")) {
    check_products_of_pairs(37, 501, 70);
    check_products_of_pairs(40, 33, 128);
  }
  check_supports();
  check_rows();
  std::printf(failures ? "%d failed\n" : "all hold\n", failures);
  return failures != 0;
}
