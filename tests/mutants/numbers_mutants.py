"""Long sums, tiny and huge numbers, threads, waiting."""

from mutant import Mutant

CENTRE = "kernels/centre.py"
CPU = "kernels/cpu/"
LONG = "tests/test_long_sequences.py"

NUMBERS = (
    Mutant(
        "every token is added to the large sum",
        CPU + "gemm.hpp",
        "for (int i = 0; i < ROWS; ++i) sum[i][0] = sum[i][1] = Vec{};",
        """for (int i = 0; i < ROWS; ++i)
    for (float* x : {c + i * stride, c + i * stride + LANES})
      sum[i][x != c + i * stride] = ADD ? load(x) : Vec{}, store(x, Vec{});""",
        f"{LONG} -k 'test_outputs and cpu'",
    ),
    Mutant(
        "a native step forgets what rounding left out",
        CPU + "step.hpp",
        "new_low[j] = rest - (new_high[j] - sum);",
        "new_low[j] = 0;",
        f"{LONG} -k 'still_grows and cpu'",
    ),
    Mutant(
        "a step of torch forgets what rounding left out",
        "kernels/compensated.py",
        "low - (result - rounded).detach()",
        "low * 0",
        f"{LONG} -k 'still_grows and torch'",
    ),
    Mutant(
        "a portion overwrites what the one after it gave its keys",
        CPU + "run_backward.hpp",
        "window.keys_met = met_before(v, pass, portion);",
        "",
        "tests/test_workers.py -k 'portions and causal'",
    ),
    Mutant(
        "a portion begins with an empty field",
        CPU + "run_forward.hpp",
        "    if (portion.from == 0) start_field(v, pass, field);",
        "    start_field(v, pass, field);",
        "tests/test_workers.py -k 'portions and causal'",
    ),
    Mutant(
        "memory that could not be had is asked for again",
        CPU + "memory.hpp",
        "    if (pieces_.empty() || used_ + rounded > size_) add(std::max(rounded, MINIMUM));\n    total_ += rounded;",
        "    total_ += rounded;\n    if (pieces_.empty() || used_ + rounded > size_) add(std::max(rounded, MINIMUM));",
        "tests/test_workers.py -k no_memory",
    ),
    Mutant(
        "an exception ends the process",
        CPU + "workers.hpp",
        "        failure = std::current_exception();",
        "        std::abort();",
        "tests/test_workers.py -k no_memory",
    ),
    Mutant(
        "tiny features count in the native engine",
        CPU + "features.hpp",
        "  return x < splat(TINY) ? Vec{} : x;  // NaN stays NaN",
        "  return x < Vec{} ? Vec{} : x;",
        "tests/test_tiny_features.py -k cpu",
    ),
    Mutant(
        "tiny features count in the torch engine",
        "features/elementwise.py",
        "return phi.masked_fill(phi.abs() < smallest(phi.dtype), 0)",
        "return phi",
        "tests/test_tiny_features.py -k torch",
    ),
    Mutant(
        "tiny sums are divided by in the native engine",
        CPU + "forward.hpp",
        "divisor = std::fabs(sum) < TINY ? INFINITE : sum",
        "divisor = sum == 0 ? INFINITE : sum",
        "tests/test_tiny_features.py -k 'cpu and sums'",
    ),
    Mutant(
        "products of huge queries and keys are infinite",
        "kernels/precision.py",
        "return x.clamp_(-limit, limit)",
        "return x",
        "tests/test_promises.py -k 'large_enough and not linear'",
    ),
    Mutant(
        "the command leaves waiting to torch",
        "__init__.py",
        "if waiting.is_command():",
        "if False:",
        "tests/test_waiting.py",
    ),
    Mutant(
        "the command overrules the user",
        "waiting.py",
        "os.environ.setdefault(VARIABLE, POLICY)",
        "os.environ[VARIABLE] = POLICY",
        "tests/test_waiting.py",
    ),
    # the centre of the far field
    Mutant(
        "the far field has no centre in the torch engine",
        CENTRE,
        "return torch.where(square < (1 + AGREEMENT) * mean.square(), mean, 0)",
        "return torch.zeros_like(mean)",
        f"{LONG} -k 'test_gradients and torch and linear'",
    ),
    Mutant(
        "the far field has no centre in the native engine",
        CPU + "centre.hpp",
        "  return square < mean * mean * splat(1 + AGREEMENT) ? mean : Vec{};",
        "  return Vec{};",
        f"{LONG} -k 'test_gradients and cpu and linear'",
    ),
    Mutant(
        "a centre is chosen before anything is folded",
        CENTRE,
        "return now >= FIRST and now // unit * unit > before",
        "return now // unit * unit > before",
        f"{LONG} -k ever_more_rarely",
    ),
    Mutant(
        "the first tile is not cut",
        CENTRE,
        "for part in [tokens] if number else _doubling_parts(tokens, block, reverse):",
        "for part in [tokens]:",
        f"{LONG} -k 'test_gradients and torch'",
    ),
    Mutant(
        "outputs are rounded before the backward",
        "kernels/problem.py",
        "return borders and q.shape[2] >= LOW_FROM and",
        "return False and borders and q.shape[2] >= LOW_FROM and",
        f"{LONG} -k 'test_gradients and linear'",
    ),
    Mutant(
        "low parts of outputs are not packed in the native engine",
        CPU + "forward.hpp",
        "    if (to.low) pack_low(to.out, sums, v.V, to.low);",
        "    if (to.low) std::fill(to.low, to.low + v.V, int8_t(0));",
        f"{LONG} -k 'test_gradients and cpu and linear'",
    ),
    Mutant(
        "low parts of outputs are not read in the native engine",
        CPU + "low.hpp",
        "low[j] = unit * packed[j];",
        "low[j] = 0 * unit * packed[j];",
        f"{LONG} -k 'test_gradients and cpu and linear'",
    ),
    Mutant(
        "states are handed on about their centre in the torch engine",
        CENTRE,
        "return torch.addcmul(self.sum, self.sum[..., -1:], self.centre)",
        "return self.sum",
        f"{LONG} -k 'have_no_centre and torch'",
    ),
    Mutant(
        "states are handed on about their centre in the native engine",
        CPU + "field.hpp",
        "    if (is_centred(v))\n      for (long j",
        "    if (false)\n      for (long j",
        f"{LONG} -k 'have_no_centre and cpu'",
    ),
    Mutant(
        "centres move without their sums",
        CPU + "field.hpp",
        "load(row(v, j, m)) + by * splat(total[m])",
        "load(row(v, j, m)) + 0 * by * splat(total[m])",
        f"{LONG} -k 'however and cpu'",
    ),
    Mutant(
        "stretches fold values as they are into a centred sum",
        CPU + "stretches.hpp",
        "store(sum, a + (load(more) - weight * low))",
        "store(sum, a + load(more))",
        f"{LONG} -k 'however and linear-cpu'",
    ),
    Mutant(
        "a row that sees little of the far field is the centre in the torch engine",
        CENTRE,
        "mostly_far = far_share >= 0.5",
        "mostly_far = far_share >= 0",
        f"{LONG} -k 'hardly_see and torch'",
    ),
    Mutant(
        "a row that sees little of the far field is the centre in the native engine",
        CPU + "centre.hpp",
        "const bool mostly_far = far_share >= 0.5f;",
        "const bool mostly_far = true;",
        f"{LONG} -k 'hardly_see and cpu'",
    ),
)
