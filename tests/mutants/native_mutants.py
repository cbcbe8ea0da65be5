"""Hand-made bugs of the C++ engine: each is compiled before its tests run."""

from mutant import Mutant


def native(words: str) -> str:
    return f"tests/test_native.py -k '{words}'"


CPU = "kernels/cpu/"

NATIVE = (
    Mutant(
        "the field does not shrink when maxima grow",
        CPU + "features.hpp",
        "    if (fold.decays) field->scale(v, fold.decay, first, count);\n",
        "",
        native("favor and forward_equals_reference"),
    ),
    Mutant(
        "a dead key enters the field",
        CPU + "features.hpp",
        "const bool counts = keys.fold[begin + t] != 0;",
        "const bool counts = true;",
        native("favor and masked_forward"),
    ),
    Mutant(
        "the own block sees the next token",
        CPU + "forward.hpp",
        "hide_rows(x, s - j * PANEL);",
        "hide_rows(x, s - j * PANEL - 1);",
        native("paper and causal_means_causal or paper and forward_equals"),
    ),
    Mutant(
        "a near block sees the next token",
        CPU + "exact.hpp",
        "const int earlier = std::min(e - offset - j * PANEL, PANEL);",
        "const int earlier = std::min(e - offset - j * PANEL - 1, PANEL);",
        native("favor-near and causal_means_causal or favor-near and forward_equals"),
    ),
    Mutant(
        "no certificate in the native engine",
        CPU + "forward.hpp",
        "if (smallest >= CERTIFICATE || count == 1",
        "if (smallest >= 0 || count == 1",
        native("paper and extreme or paper and causal_means or smaller_blocks"),
    ),
    Mutant(
        "no certificate in the native backward",
        CPU + "backward.hpp",
        "if (v.logarithmic() && count > 1 && too_large()) return",
        "if (false) return",
        native("smaller_blocks or paper and extreme or paper and gradients"),
    ),
    Mutant(
        "slices merge with equal shares",
        CPU + "forward.hpp",
        "const float pull = other / total;",
        "const float pull = 0.5f;",
        native("parts_of_a_head"),
    ),
    Mutant(
        "a slice's gradients are forgotten",
        CPU + "run_backward.hpp",
        "for (long i = begin; i < end; ++i) to[i] += from[i];",
        "for (long i = begin; i + 1 < end; ++i) to[i] += from[i];",
        native("parts_of_a_head"),
    ),
    Mutant(
        "a block's own keys count twice in what lies before it",
        CPU + "stretches.hpp",
        "        store(more, a), store(more + LANES, b);",
        "        store(more, load(sum)), store(more + LANES, load(sum + LANES));",
        native("parts_of_a_head and linear or stretches"),
    ),
    Mutant(
        "a stretch does not hear from the last one",
        CPU + "stretches.hpp",
        "    grads[i].copy_from(v, grads[i + 1]);\n",
        "    grads[i].clear(v);\n",
        native("parts_of_a_head and linear or stretches"),
    ),
    Mutant(
        "rows and columns trade the wrong way",
        CPU + "simd.hpp",
        "IVec{(I & HALF ? LANES + I : I + HALF)...}",
        "IVec{(I & HALF ? LANES + I : I)...}",
        native("favor and forward_equals_reference"),
    ),
    Mutant(
        "the gradient of the field does not shrink",
        CPU + "backward.hpp",
        "    finish_fold(block, fold);\n    if (fold.decays) grad_.scale(v, fold.decay);\n  }\n\n  // Blocks",
        "    finish_fold(block, fold);\n  }\n\n  // Blocks",
        native("favor and gradients_equal"),
    ),
    Mutant(
        "a decoded block is not folded away",
        CPU + "step.hpp",
        "count ? fold(count) : keep_far();",
        "keep_far();",
        native("extend_equals_forward"),
    ),
    Mutant(
        "exp loses its last term",
        CPU + "simd.hpp",
        "  Vec p = splat(0.008312501297f);",
        "  Vec p = splat(0.0f);",
        native("single_precision"),
    ),
    Mutant(
        "half precision is read as bfloat16",
        CPU + "tokens.hpp",
        "row[i] = from_float16(x[i]) * factor;",
        "row[i] = from_bfloat16(x[i]) * factor;",
        native("low_precision"),
    ),
    Mutant(
        "a row gives its gradient to the next token",
        CPU + "backward.hpp",
        "hide_rows(score, s - j * PANEL), hide_rows(grad, s - j * PANEL);",
        "hide_rows(score, s - j * PANEL - 1), hide_rows(grad, s - j * PANEL - 1);",
        native("linear and gradients_equal"),
    ),
    Mutant(
        "the second vector of a panel is hidden like the first",
        CPU + "forward.hpp",
        "without_first(load(scores + LANES), count - LANES)",
        "without_first(load(scores + LANES), count)",
        native("linear and forward_equals"),
    ),
    Mutant(
        "the slope of elu + 1 is that of exp",
        CPU + "features.hpp",
        "return vmin(unit, weight);",
        "return weight;",
        native("linear and gradients_equal"),
    ),
    Mutant(
        "the slope of a small softplus loses its digits",
        CPU + "features.hpp",
        "return x < splat(0.5f) ? x * series : 1 - vexp(-x);",
        "return 1 - vexp(-x);",
        native("small_slopes"),
    ),
    Mutant(
        "the slope of relu squared forgets the normaliser",
        CPU + "features.hpp",
        "return 2 * vsqrt(weight) * vsqrt(unit);",
        "return 2 * vsqrt(weight);",
        native("linear-relu2 and gradients_equal"),
    ),
    Mutant(
        "tiny sums meet tiny features before the gradient",
        CPU + "backward.hpp",
        "store(x, load(x) * load(r_.unit + t));",
        "store(x, load(x) * (load(r_.unit + t) / load(r_.sum + t)) * load(r_.sum + t));",
        native("tiny_features"),
    ),
    Mutant(
        "the totals of a fold are taken after its rows have spoken",
        CPU + "backward.hpp",
        "splat(fold_total_[m])",
        "splat(grad_.total[m])",
        native("linear and gradients_equal"),
    ),
    Mutant(
        "keys of a segment are kept in one place",
        CPU + "backward.hpp",
        "    if (v.in_place()) scout_.lanes = folds->weights;  // where they are to stay\n",
        "",
        native("linear and gradients_equal"),
    ),
    Mutant(
        "gradients of two sweeps do not add up",
        CPU + "run_backward.hpp",
        "return p.slices > 1 || (p.near_blocks && !p.causal);",
        "return p.slices > 1;",
        native("favor and gradients_equal"),
    ),
    Mutant(
        "a read field is added to what was there",
        CPU + "forward.hpp",
        "    if (begin == 0)\n      multiply(",
        "    if (begin < 0)\n      multiply(",
        native("favor and forward_equals"),
    ),
    Mutant(
        "torch's threads fill the gradient of the first state",
        CPU + "run.py",
        "grad_state = borders_sum.new_empty(_shapes(given, 1)[1])",
        "grad_state = borders_sum.new_zeros(_shapes(given, 1)[1])",
        "tests/test_workers.py -k wakes_no_threads",
    ),
    Mutant(
        "gradients of sinks are added to what was in memory",
        CPU + "run_backward.hpp",
        "  clear(saved.sink_k, slices * p.sinks * p.head_dim);\n",
        "",
        native("favor and gradients_equal"),
    ),
    Mutant(
        "gradients of a map are cleared in part",
        CPU + "run_backward.hpp",
        "clear(saved.key, heads * p.num_features * p.head_dim);",
        "clear(saved.key, heads * p.num_features);",
        native("gradients_equal"),
    ),
)
