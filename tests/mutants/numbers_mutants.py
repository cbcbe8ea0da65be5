"""Long sums, tiny and huge numbers, threads, waiting."""

from mutant import Mutant

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
)
