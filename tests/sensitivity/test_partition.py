"""Which modules are blocks."""

from torch import nn

from gact_dist.sensitivity.partition import blocks_of


def row(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU6(True))


class Residual(nn.Module):
    """As image models repeat them, with rows of single layers inside of a Sequential."""

    def __init__(self, rows: int, deep: bool = False) -> None:
        super().__init__()
        parts = [nn.Sequential(row(4), row(4)) if deep else row(4) for _ in range(rows)]
        self.parts = nn.Sequential(*parts, nn.Conv2d(4, 4, 1))

    def forward(self, x):
        return x + self.parts(x)


def test_what_is_repeated_and_has_a_few_rows_inside_is_one_block():
    model = nn.Sequential(row(4), Residual(2), Residual(3), nn.Conv2d(4, 2, 1))
    assert blocks_of(model) == list(model)


def test_many_rows_or_rows_of_rows_are_blocks_of_their_own():
    model = nn.Sequential(Residual(5), Residual(2, deep=True))
    many, deep = model
    assert blocks_of(model) == [*many.parts, *deep.parts[0], *deep.parts[1], deep.parts[2]]


def test_rows_of_a_model_that_is_not_repeated_are_blocks():
    model = Residual(3)
    assert blocks_of(model) == list(model.parts)


def test_a_stage_that_is_a_list_has_blocks_inside():
    model = nn.Sequential(nn.Sequential(row(4), row(4)), nn.Sequential(row(4), row(4), row(4)))
    assert blocks_of(model) == [*model[0], *model[1]]
