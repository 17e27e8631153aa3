"""Steps about the mean of what a layer reads."""

import torch
from torch import nn

from models.recipe.centred import NEW, Centred


def stepped(rate: float, *, mean: float) -> tuple[nn.Linear, nn.Linear, torch.Tensor]:
    """A layer before and after a step for (tokens, in) inputs about a mean."""
    torch.manual_seed(0)
    layer, before = nn.Linear(64, 8), nn.Linear(64, 8)
    before.load_state_dict(layer.state_dict())
    inputs = torch.randn(50, 64) + mean * torch.randn(64)
    centred = Centred(nn.Sequential(layer))
    centred.measure(lambda: layer(inputs))
    optimizer = torch.optim.AdamW(layer.parameters(), rate, weight_decay=0.0)
    (layer(inputs) - torch.randn(50, 8)).square().sum().backward()
    with centred.stepping():
        optimizer.step()
    return before, layer, inputs


def test_what_all_tokens_share_moves_as_far_as_the_bias() -> None:
    before, after, inputs = stepped(0.01, mean=30.0)
    moved = after(inputs).mean(0) - before(inputs).mean(0)
    torch.testing.assert_close(moved.abs(), torch.full((8,), 0.01), rtol=0.02, atol=0)


def test_what_tells_tokens_apart_is_learned_whatever_they_share() -> None:
    changes = []
    for mean in (0.0, 30.0):
        before, after, inputs = stepped(0.01, mean=mean)
        about = inputs - inputs.mean(0)
        changes.append(about @ (after.weight - before.weight).T)
    assert changes[1].square().mean() > 0.5 * changes[0].square().mean()


def test_means_follow_what_is_read_slowly() -> None:
    """One measure is of few examples."""
    layer = nn.Linear(4, 4)
    centred = Centred(nn.Sequential(layer))
    for inputs in (torch.ones(1, 9, 4), torch.zeros(1, 2, 4)):
        centred.measure(lambda inputs=inputs: layer(inputs))  # type: ignore[misc]
    torch.testing.assert_close(centred.means[layer], torch.full((4,), 1 - NEW))


def test_layers_that_are_not_moved_are_not_looked_at() -> None:
    still, biasless = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4, bias=False)
    assert Centred(nn.Sequential(still, biasless)).layers == []
