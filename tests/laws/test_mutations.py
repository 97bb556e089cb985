"""The laws can fail: each mistake of a list breaks one, and without it the same law holds."""

import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch

from anybatch import AnybatchError
from tests.faults import test_not_finite, test_overflow, test_state, test_table
from tests.laws import drawn, mutations, test_masked, test_models, test_precision, test_uncut
from tests.laws.check import ADVICE, check, cut, reference, windowed
from tests.laws.losses import CASES
from tests.laws.totals import TOTALS
from tests.parity import test_identical
from tests.precision import test_master_weights as test_masters

pytestmark = pytest.mark.filterwarnings(ADVICE)

ROWS = 5  # cut into 2, 2, 1
BY_NAME = {case.name: case for case in [*CASES, *TOTALS]}
WEIGHTED = "cross_entropy-label_smoothing=0.1-weight=per_class-ignore_index=2-reduction=mean"
TOKENS = "cross_entropy-tokens-ignore_index=0-reduction=mean"
SOFT = "cross_entropy-soft-dense-reduction=mean"
FORWARD = "out of memory in forward"

Law = Callable[[], None]


def cut_law(name: str, *, mask: str = "some", form: str = "function", repeats: int = 1) -> Law:
    """The same step, once or more often."""

    def law() -> None:
        problem = BY_NAME[name].problem(form, ROWS, mask=mask)
        whole = reference(problem)
        for _ in range(repeats):
            check(cut(problem, 2), whole)

    return law


def window_law(name: str, form: str = "function") -> Law:
    def law() -> None:
        problem = BY_NAME[name].problem(form, ROWS)
        check(windowed(problem, [1, 3, 1]), reference(problem))

    return law


def bit_law() -> None:
    for case in CASES[::10]:
        test_uncut.test_uncut_is_torch_to_the_bit(case)


def fault_law(row: str, kind: str) -> Law:
    return partial(test_table.test_recovers, row, kind, "step", 2, 5)


update_law = partial(
    test_identical.test_cut_step_is_the_loop_with_the_same_cut, "mlp", 5, ("norm", 0.5), test_identical.sgd
)
bfloat16_law = partial(
    test_precision.test_a_thousand_micro_batches_add_up, test_precision.EQUAL, torch.bfloat16, {}
)
float16_law = partial(test_precision.test_by_name, BY_NAME["mse-reduction=mean"], "fp16-mixed")
overflow_law = partial(test_overflow.test_an_overflow_costs_no_update, "dropout", "mixed", "step", 2, 2)
drop_law = partial(
    test_not_finite.test_drop_is_the_step_on_the_others, "divided early", [3], 32, "loss", "step"
)
drawn_law = partial(drawn.run, drawn.LAWS["a fault changes no update"], seed=1, examples=60, is_shrunk=False)
found_law = partial(test_state.test_gradients_found_before_a_step_are_added, "dropout", None, 4)
# Of a forward that grows a table, and remembers its length beside it.
table_law = partial(test_state.test_attributes_move_once_for_each_micro_batch, "passes", "none", 5)
raise_law = partial(
    test_table.test_what_raises_changes_nothing, "anything else", "step", "counting", "mid", 2, 5
)

BREAKS: dict[str, list[Law]] = {
    "mean_of_means": [cut_law(TOKENS), cut_law("mse-reduction=mean")],
    "divide_by_the_number_of_micro_batches": [cut_law("mse-reduction=mean")],
    "first_weight_times_micro_batches": [cut_law(TOKENS)],
    "rows_instead_of_valid_targets": [cut_law(TOKENS), window_law(TOKENS)],
    "elements_of_soft_targets": [cut_law(SOFT)],
    "class_weights_forgotten": [cut_law(WEIGHTED), window_law(WEIGHTED)],
    "ignored_index_forgotten": [cut_law(WEIGHTED)],
    "smoothing_divided_by_count": [cut_law(WEIGHTED)],
    "batchmean_as_mean": [cut_law("kl_div-reduction=batchmean")],
    "ctc_without_target_lengths": [cut_law("ctc-reduction=mean")],
    "late_divisor_of_another_term": [window_law("named", "terms")],
    "one_bank_for_all_terms": [cut_law("named", form="terms")],
    "coefficients_forgotten": [cut_law("named", form="weighed"), cut_law("named", form="terms")],
    "uncut_divided_by_ourselves": [bit_law],
    "mean_times_count": [cut_law("cross_entropy-reduction=mean", mask="one")],
    "last_micro_batch_dropped": [cut_law(WEIGHTED)],
    "tail_scaled_like_a_full_one": [cut_law("mse-reduction=mean")],
    "sums_in_the_parameters_dtype": [bfloat16_law],
    "memory_left_shared": [partial(test_models.test_any_cut_gives_the_whole_batch, "shared memory", {})],
    "gradients_of_the_step_before_left_over": [cut_law(WEIGHTED, repeats=2)],
    "clip_per_micro_batch": [update_law],
    "update_per_micro_batch": [update_law],
    "schedule_per_micro_batch": [update_law],
    "masked_batches_update_too": [partial(test_masked.test_nothing_changes, BY_NAME[TOKENS])],
    "scale_left_in_the_gradient": [float16_law],
    "an_overflow_loses_the_update": [overflow_law],
    "redone_with_another_mask": [
        overflow_law, fault_law("... in backward, nothing accepted", "dropout"), drawn_law,
    ],
    "what_was_accepted_comes_again": [fault_law("... after something reached .grad", "dropout")],
    "buffers_not_put_back": [fault_law(FORWARD, "counting"), raise_law, drawn_law],
    "attributes_not_put_back": [fault_law(FORWARD, "counting"), raise_law, drawn_law],
    "a_half_that_is_forgotten": [fault_law(FORWARD, "dropout"), drawn_law],
    "a_micro_batch_accepted_twice": [fault_law(FORWARD, "dropout"), drawn_law],
    "streams_of_python_and_numpy_forgotten": [fault_law(FORWARD, "drawing")],
    "a_buffer_put_in_the_place_of_another_forgotten": [raise_law],
    "attributes_left_by_a_first_pass": [table_law],
    "containers_forgotten": [raise_law],
    "gradients_found_lost": [raise_law],
    "windows_merged_twice": [window_law("mse-reduction=mean")],
    "another_provisional_divisor_in_each_add": [window_law("mse-reduction=mean")],
    "gradients_found_dropped": [found_law],
    "dropped_rows_keep_their_weight": [drop_law],
    "no_weight_backup": [test_masters.test_a_thousand_small_updates_arrive],
}  # fmt: skip


HOLD: set[Law] = set()  # laws that have been seen to hold


@pytest.mark.parametrize(
    ("name", "law"),
    [
        pytest.param(name, law, id=f"{name}-{index}")
        for name, laws in BREAKS.items()
        for index, law in enumerate(laws)
    ],
)
def test_each_mistake_breaks_a_law(name: str, law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    if law not in HOLD:
        law()
        HOLD.add(law)
    getattr(mutations, name)(monkeypatch)
    with pytest.raises((AssertionError, AnybatchError, RuntimeError, UserWarning, BaseExceptionGroup)):
        law()


def test_every_mistake_is_tried() -> None:
    told = {name for name, value in vars(mutations).items() if inspect.isfunction(value) and name[0] != "_"}
    assert BREAKS.keys() == told - {"replace", "contextmanager"}
