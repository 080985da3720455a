"""The backward formulas that rounding would break, and what is kept for them instead.

[Note: rules] Rounding what an operator saved adds noise to its gradient that is proportional to the rounding as long as
the backward is a smooth function of what was saved. Some are not. A backward that compares what was saved finds no
element equal to the result any more; one that divides by it, or takes its log or root, meets values near zero, or out
of the domain; one that reads its sign finds other signs. What such an operator saves is stored exactly. docs/
backward_rules.md is generated from this table, and tests/hooks/test_backward_rules.py holds it against every
differentiable operator of torch: what is not in it must behave as its derivative predicts.

[Note: beside a pole] The gradient of log(p) has no bound where p is near zero. In p * log(p + eps) it is multiplied by
p, and in log(sigmoid(x) + eps) by p (1 - p), which are small where it is large. Their rounding errors are not: they
have the same size in all of a group. So what multiplies the gradient of such an operator, element by element, is stored
exactly as well: the factors of its result, and what the pointwise operator saved that computed its operand. A statistic
that many elements share (the root in a normalisation) has a smaller shape than they have, and is passed over.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from .._torch_internals import saved_slots, shape_of_output


class Rule(NamedTuple):
    """What must not be rounded of what one operator saves."""

    slots: tuple[str, ...]
    """the saved attributes as the autograd node names them, without `_saved_`"""
    reason: str
    """what the backward does with them"""
    shown: str = ""
    """what is kept where a call of torch.nn.functional, or a module, shows the operator; see one_bit.py"""
    unless: Callable[[Any], bool] | None = None
    """a node for which the rule does not hold"""
    condition: str = ""
    """the same in words"""


def _in_rows(reason: str, rows: str) -> dict[str, Rule]:
    """{operator: rule} of lines `Operator: slot slot`."""
    parsed = (line.split(":") for line in rows.strip().splitlines())
    return {operator.strip(): Rule(tuple(slots.split()), reason) for operator, slots in parsed}


def _is_euclidean(node: Any) -> bool:
    """Of a norm or a distance."""
    order = next((getattr(node, name) for name in ("_saved_ord", "_saved_p") if hasattr(node, name)), None)
    return order is None or order == 2


def _is_smooth_power(node: Any) -> bool:
    """x, x^2, x^3, x^4, and c^x, whose backward is linear in its result."""
    if "exponent" in saved_slots(node):  # a tensor, which is not read: that would unpack it
        return "self" not in saved_slots(node)
    return node._saved_exponent in (1, 2, 3, 4)


def exponent_of(node: Any) -> float | None:
    """For what stands in a graph for a node that is not there any more: None unless that is a power; else an exponent
    of the same rule."""
    if node is None or operator_of(node.name()) != "Pow":
        return None
    return 1.0 if _is_smooth_power(node) else 0.5


_COMPARES = "compares it with the result or with a limit: equal elements, or those within, get the gradient"
_SIGN = "takes its sign, which jumps at zero"
_DIVIDES = "divides by it"
_LOG = "takes its log, or divides by it: zero and what is near it are singular"
_ROOT = "takes the root of a difference from the end of its domain, and divides by that"
_STEEP = "takes the exponential of its difference from another saved tensor: the error grows exponentially"
_POLES = "has poles, or steps, within the range of what is saved"
_SOLVES = "solves with it: the error grows with its condition number"
_RESIDUAL = "takes the difference of both, which may be far smaller than either; their signs or limits decide"
_STATISTIC = "multiplies or shifts many elements by it: their errors would be alike"
_ONE_BIT = "one bit"
_MASK = "is added to scores: -inf and the like stand among ordinary values"

RULES: dict[str, Rule] = {
    **_in_rows(
        _COMPARES,
        """
        Amax: self result
        Amin: self result
        Aminmax: self min max
        Clamp: self min max
        ClampMax: self max
        ClampMin: self min
        FakeQuantizeLearnablePerChannelAffine: self scale zero_point
        FakeQuantizeLearnablePerTensorAffine: self scale zero_point
        Fmax: self other
        Fmin: self other
        ForeachMaximum: self
        ForeachMinimum: self
        IndexReduce: self source result
        Max: self result
        Maximum: self other
        Median: self result
        Min: self result
        Minimum: self other
        NanToNum: self
        Nanmedian: self result
        Nansum: self
        Nextafter: self other
        PreluKernel: self weight
        Renorm: self
        RreluWithNoise: self result noise
        RreluWithNoiseFunctional: self noise
        ScatterReduce: self src result
        SegmentReduce: data result
        """,
    ),
    **dict.fromkeys(
        ("Hardshrink", "Hardsigmoid", "Hardtanh", "Softshrink", "Threshold"), Rule(("self",), _COMPARES, shown=_ONE_BIT)
    ),
    "Hardswish": Rule(("self",), _COMPARES, shown="rounded, with two bits for the sides of its limits"),
    "LeakyRelu": Rule(("self", "result"), "reads only where it is positive", shown=_ONE_BIT),
    **_in_rows(
        _SIGN,
        """
        Abs: self
        Angle: self
        Copysign: self result
        LogSigmoid: self buffer
        Sgn: self result
        SpecialI0E: self result
        SpecialI1: self result
        SpecialI1E: self result
        """,
    ),
    **_in_rows(
        _DIVIDES,
        """
        Addcdiv: tensor2
        Atan2: self other
        Cumprod: self result
        Div: other
        EuclideanDist: result
        ForeachDiv: other
        Hypot: result
        Prod: self result
        Reciprocal: result
        Rsqrt: result
        Sinc: self
        Sqrt: result
        StandardGamma: self result
        Std: result
        StdMean: result0
        WeightNormInterface: result1
        """,
    ),
    **_in_rows(
        _LOG,
        """
        BinaryCrossEntropy: self target
        ForeachPow: self exponent result
        Log: self
        Log10: self
        Log1P: self
        Log2: self
        Logit: self
        SpecialEntr: self
        SpecialXlog1Py: self other
        Xlogy: self other
        """,
    ),
    **_in_rows(
        _ROOT,
        """
        Acos: self
        Acosh: self
        Asin: self
        Atanh: self
        Erfinv: self
        """,
    ),
    **_in_rows(
        _STEEP,
        """
        CtcLoss: log_probs result0 result1
        Logcumsumexp: self result
        Logsumexp: self result
        SpecialLogNdtr: self result
        """,
    ),
    **_in_rows(
        _POLES,
        """
        Digamma: self
        Fmod: self other
        GridSampler2D: grid
        GridSampler2DCpuFallback: grid
        GridSampler3D: grid
        CudnnGridSampler: grid
        Igamma: self other
        Igammac: self other
        Lgamma: self
        Mvlgamma: self
        Polygamma: self
        Remainder: self other
        SpecialNdtri: result
        SpecialZeta: self other
        Tan: result
        """,
    ),
    **_in_rows(
        _SOLVES,
        """
        Cholesky: result
        CholeskyInverse: self result
        CholeskySolve: self input2 result
        LinalgCholeskyEx: L
        LinalgDet: A LU result
        LinalgEig: eigenvalues eigenvectors
        LinalgEigh: eigenvalues eigenvectors
        LinalgHouseholderProduct: input tau result
        LinalgInvEx: inverse
        LinalgLstsq: self b solution
        LinalgLu: P L U
        LinalgLuFactorEx: LU
        LinalgLuSolve: LU result
        LinalgMatrixExp: self
        LinalgMatrixSqrth: self
        LinalgPinv: self result
        LinalgQr: Q R
        LinalgSlogdet: A LU sign
        LinalgSolveEx: A LU result
        LinalgSolveTriangular: self result
        LinalgSvd: U S Vh
        Ormqr: self input2 input3 result
        TriangularSolve: self A solution
        """,
    ),
    **_in_rows(
        _RESIDUAL,
        """
        HuberLoss: self target
        MultiMarginLoss: self target weight
        MultilabelMarginLoss: self target is_target
        SmoothL1Loss: self target
        SoftMarginLoss: self target
        """,
    ),
    **_in_rows(
        _STATISTIC,
        """
        BatchNormNoUpdate: result1 result2
        BatchNormWithUpdate: result1 result2
        CudnnBatchNorm: result1 result2
        FusedRmsNorm: result1
        MiopenBatchNorm: result1 result2
        NativeBatchNorm: result1 result2
        NativeBatchNormLegit: result1 result2
        NativeBatchNormLegitNoTraining: result1 result2
        NativeGroupNorm: result1 result2
        NativeLayerNorm: result1 result2
        """,
    ),
    **_in_rows(
        _MASK,
        """
        ScaledDotProductCudnnAttention: attn_bias
        ScaledDotProductEfficientAttention: attn_bias
        ScaledDotProductFlashAttentionForCpu: attn_mask
        ScaledDotProductFusedAttentionOverrideable: attn_bias
        EfficientAttention: bias
        CudnnAttention: attn_bias
        """,
    ),
}
"""By the autograd node's name without `Backward` and its number."""

RULES["LogSoftmax"] = Rule(
    ("result",), _STEEP, condition="where nothing else reads it, Config.log_softmax may have it sampled"
)

_NOT_EUCLIDEAN = "compares it with the result, or takes its sign"
CONDITIONAL: dict[str, tuple[Rule, ...]] = {
    **{
        operator: (
            Rule(("result",), _DIVIDES),
            Rule(operands, _NOT_EUCLIDEAN, unless=_is_euclidean, condition="of any order but 2"),
        )
        for operator, operands in {
            "Cdist": ("x1", "x2"),
            "Dist": ("self", "other"),
            "ForeachNorm": ("self",),
            "LinalgVectorNorm": ("self",),
            "Norm": ("self",),
            "Pdist": ("self",),
        }.items()
    },
    "Pow": (
        Rule(
            ("self", "exponent", "result"),
            _LOG,
            unless=_is_smooth_power,
            condition="but for exponents 1 to 4, and for a number to the power of a tensor",
        ),
    ),
}
"""Operators with more than one rule, or with one that depends on an argument."""


BESIDE = Rule((), "is a factor of a gradient that has no bound")
"""of what stands beside an operator with a pole"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SINGULAR: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        _names(
            """
    Acos Acosh Asin Atanh BinaryCrossEntropy Erfinv Log Log10 Log1P Log2 Logit Reciprocal Rsqrt
    SpecialEntr Sqrt
"""
        ),
        (0,),
    ),
    **{operator: (0,) for operator, rule in RULES.items() if rule.reason == _SOLVES},
    "Addcdiv": (2,),
    "Atan2": (0, 1),
    "Div": (1,),
    "Pow": (0,),
    "SpecialXlog1Py": (1,),
    "Xlogy": (1,),
}
"""Operators whose derivative with respect to an operand, by its number, has no bound. See [Note: beside a pole]."""

PASSED = _names(
    """
    Add Alias Clamp ClampMax ClampMin Clone Expand Neg Permute Rsub Select Slice Squeeze Sub T ToCopy
    Transpose Unsqueeze UnsafeView View
"""
)
"""Operators that pass a gradient on as it is, up to a factor."""

POINTWISE = _names(
    """
    Addcmul Cos Cosh Elu Erf Erfc Exp Exp2 Expm1 Gelu Lerp Mish Mul Pow Sigmoid Silu Sin Sinh Softmax
    Softplus Tanh
"""
)
"""Operators that multiply each element of a gradient by a function of what they saved of this element."""

_STEPS = _names(
    """
    AdaptiveMaxPool2D AdaptiveMaxPool3D Cummax Cummin Elu FractionalMaxPool2D FractionalMaxPool3D Kthvalue
    MaxPool2DWithIndices MaxPool3DWithIndices Mode Relu Sort Topk
"""
)
"""Operators whose derivative jumps, and that save where or of which element it is another."""

PRODUCTS = frozenset(("Addmm", "Baddbmm", "Bmm", "Matmul", "Mm"))
"""The same of a matrix that is solved with: A = h h^T, whose inverse is large where h is small."""

_FARTHEST = 8


@cache
def operator_of(name: str) -> str:
    """The operator that a node's name stands for: 'DivBackward0' -> 'Div'."""
    return re.sub(r"(Backward\w*?)+\d*$", "", name)


def _rules_of(name: str) -> tuple[Rule, ...]:
    operator = operator_of(name)
    return CONDITIONAL.get(operator) or tuple(rule for rule in (RULES.get(operator),) if rule is not None)


def _singular_operands(node: Any) -> tuple[int, ...]:
    operator = operator_of(node.name())
    if node.name().count("Backward") != 1:  # the backward of a backward, or a function of Python's
        return ()
    if operator == "Pow" and _is_smooth_power(node):
        return ()
    return SINGULAR.get(operator, ())


def below_pole(node: Any) -> Iterator[Any]:
    """The operators whose results a node with a pole reads. See [Note: beside a pole]."""
    solves = any(rule.reason == _SOLVES for rule in _rules_of(node.name()))
    factors = POINTWISE | PRODUCTS if solves else POINTWISE
    operands = node.next_functions
    reached = [operands[number][0] for number in _singular_operands(node) if number < len(operands)]
    for _ in range(_FARTHEST):
        if not reached:
            return
        below = reached.pop()
        operator = "" if below is None else operator_of(below.name())
        if operator in factors and not _is_scaling(below):
            yield below
        elif operator in PASSED or operator in POINTWISE:
            reached += [one for one, _ in below.next_functions]


def may_be_below_pole(node: Any) -> bool:
    """Whether an operator may turn out to be one of these."""
    return operator_of(node.name()) in POINTWISE | PRODUCTS


def _is_scaling(node: Any) -> bool:
    """Whether it multiplies by a number, or by a tensor without a gradient."""
    return operator_of(node.name()) == "Mul" and sum(below is not None for below, _ in node.next_functions) == 1


def multiplies_pole(node: Any, slot: str) -> bool:
    """Whether what a node saved is a factor of the gradient of a pole. See [Note: beside a pole]."""
    operator, operands = operator_of(node.name()), node.next_functions
    if len(operands) < 2:
        return False
    shape = shape_of_output(node, 0)
    if operator == "Div":
        below, number = operands[1]
        return slot == "self" and below is not None and shape_of_output(below, number) == shape
    if operator != "Mul" or slot not in ("self", "other"):
        return False
    reached = [operands[1 if slot == "self" else 0][0]]
    for _ in range(_FARTHEST):
        below = reached.pop() if reached else None
        if below is None or shape_of_output(below, 0) != shape:
            continue
        if _singular_operands(below):
            return True
        if operator_of(below.name()) in PASSED or operator_of(below.name()) == "Mul":
            reached += [one for one, _ in below.next_functions]
    return False


def jumps(node: Any) -> bool:
    """Whether the derivative of an operator jumps between regions of its operand: of relu it is zero or one."""
    operator = operator_of(node.name())
    rule = RULES.get(operator)
    return operator in _STEPS or (rule is not None and (bool(rule.shown) or rule.reason in (_COMPARES, _SIGN)))


def has_rule(operator: str) -> bool:
    """Whether any rule is about the operands of an operator, by its name in torch, or its result."""
    name = operator.title().replace("_", "")
    return name in CONDITIONAL or name in SINGULAR or (name in RULES and RULES[name].reason != _STATISTIC)


def rule_of_any(node: Any) -> Rule | None:
    """A rule for anything that an autograd node saved, where its slots cannot be told apart."""
    return next((rule for rule in _rules_of(node.name()) if rule.unless is None or not rule.unless(node)), None)


def rule_of(node: Any, slot: str) -> Rule | None:
    """The rule for what an autograd node saved in a slot; None where it may be rounded."""
    for rule in _rules_of(node.name()):
        if slot in rule.slots and (rule.unless is None or not rule.unless(node)):
            return rule
    return None
