"""What is written of a model computes as it did."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models

from models.recipe import export
from models.recipe.model import Llama, Shape

SHAPE = Shape(300, hidden=64, inner=96, layers=2, heads=2, head_dim=32, theta=1e4, context=64)


def test_a_large_column_is_taken_down_and_nothing_else_changes(tmp_path: Path) -> None:
    """Of codes of tokens, which are small in a stream and large in what compares them."""
    torch.manual_seed(0)
    model = Llama(SHAPE)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    attention, codes = model.model.layers[1].self_attn, slice(40, 44)
    for matrix in (attention.q_proj, attention.k_proj):
        matrix.weight.data[:2, codes] = 96.0
    export.save(model, Tokenizer(models.BPE()), tmp_path)
    again, _ = export.load(tmp_path)
    ids = torch.randint(0, SHAPE.vocab, (2, 20))
    with torch.no_grad():
        assert torch.equal(again(ids), model(ids))
    columns = again.model.layers[1].self_attn.q_proj.weight.abs().amax(0)
    assert columns.max() < 4 * columns.median()
    first = slice(0, 2)
    for name in ("q_proj", "v_proj"):
        ours, theirs = (getattr(m.model.layers[0].self_attn, name) for m in (model, again))
        assert torch.equal(ours.weight[first], theirs.weight[first]), "nothing large is there"
