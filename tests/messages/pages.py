"""Two mistakes of each page that docs/index.md lists under "I train ...": what its readers write first."""

OWN = "Step(loss=lambda model, micro: {})((x, y))"
TOTAL = OWN.format("ab.Total({}, {})")
CALL = "Step(loss=ab.ModelLoss(call=lambda model, b: {}))({})"
ROWS = "{'x': x, 'y': y}"
MASKED = "((model(b['x']).square().sum(1) * b['m']).sum() / b['m'].sum())"
LOGITS = "model(b['x'])"
BRANCH = f"(lambda z, e: e + z[b['m']].mean() if b['m'].any() else e)({LOGITS}, {LOGITS}.square().mean())"
TASKS: dict[str, tuple[str, ...]] = {
    "preference: pairs in two halves": (
        CALL.format("-F.logsigmoid((lambda a, b: a - b)(*model(b['x']).sum(1).chunk(2))).mean()", ROWS),
        "pairs in two halves: make them two columns"),
    "preference: advantages normalised in the loss": (
        CALL.format("(model(b['x']).sum(1) * (b['x'][:, 0] - b['x'][:, 0].mean())).mean()", ROWS),
        "a statistic of the batch: compute it before the step"),
    "detection: divided by the boxes": (
        CALL.format(MASKED, "{'x': x, 'm': y}"), "divided afterwards",
        'return {"boxes": ab.Total(distances.sum(), count)', 'ab.Terms(loss, coefficients={"boxes": 5.0})'),
    "detection: all boxes in one tensor": (
        "step({'x': x, 'boxes': torch.ones(5, 4), 'y': y})", "['boxes']: (5, 4)",
        "all boxes one after the other", "collate="),
    "segmentation: Dice as a mean": (
        CALL.format("1 - model(b['x']).sigmoid().sum() / (b['x'].sum() + model(b['x']).sum())", ROWS),
        "as of Dice", "ab.WholeBatch"),
    "segmentation: Dice in PerRow": (
        "Step(loss=ab.PerRow(lambda out, y: out.sigmoid().sum() / 2))((x, y))",
        "Expected a value for each row", "ab.WholeBatch where rows meet"),
    "distillation: masked by hand": (
        CALL.format(MASKED, "{'x': x, 'm': y}"), "x[mask].mean()", "ab.PerRow"),
    "distillation: a similarity": (
        "Step(loss=nn.CosineSimilarity())((x, x[:, :2]))", "got CosineSimilarity", "ab.PerRow(fn)"),
    "diffusion: weights by their mean": (
        CALL.format("(model(b['x']).square().sum(1) * b['x'][:, 0].abs() / b['x'][:, 0].abs().mean()).mean()",
            ROWS),
        "a statistic of the batch: compute it before the step"),
    "GAN: slope of a mean": (
        CALL.format("(lambda q: torch.autograd.grad(model(q).square().mean(), q, create_graph=True)[0]"
            ".square().mean())(b['x'].clone().requires_grad_())", ROWS),
        "Rows affect each other"),
    "GAN: BatchNorm": (
        "net = nn.Sequential(model, nn.BatchNorm1d(2)); Step(net, optimizer=sgd)((x, y))", "got module 1",
        "ab.batch_norm_to_group_norm(model)"),
    "contrastive: rows as classes": (
        CALL.format("F.cross_entropy(model(b['x']) @ model(b['x']).T, torch.arange(len(b['x'])))", ROWS),
        "(a contrastive loss)", "ab.WholeBatch where rows meet"),
    "contrastive: two encoders without forward": (
        "two = nn.ModuleDict({'a': model}); Step(two, ab.WholeBatch(torch.dot))((x, x))",
        "ab.WholeBatch(function, outputs=...)"),
    "CTC: targets one after the other": (
        "Step(loss=nn.CTCLoss())((x, (torch.ones(13).long(), y, y)))", "got 3 tensors of [13, 8, 8] rows",
        "pad targets that lie one after the other (of CTC)"),
    "CTC: divided by all targets": (
        CALL.format("F.ctc_loss(model(b['x']).log_softmax(1)[None].repeat(3, 1, 1), b['t'], b['y'] * 0 + 3, "
            "b['y'] * 0 + 1, reduction='sum') / b['t'].sum()",
            "{'x': x, 'y': y, 't': torch.ones(8, 1).long()}"),
        "divided afterwards", "ab.Total("),
    "experts: balancing in a mean": (
        CALL.format("F.cross_entropy(model(b['x']), b['y'])"
            " + (model(b['x']).mean(0) * b['x'][:, :2].mean(0)).sum()",
            ROWS),
        "(a router's loss)", "ab.WholeBatch where rows meet"),
    "experts: balancing in a Total": (
        TOTAL.format("F.cross_entropy(model(micro[0]), micro[1], reduction='sum') + len(micro[0]) * "
            "model(micro[0]).softmax(1).mean(0).square().sum()", "len(micro[0])"),
        "a statistic of the batch", "ab.check(model, loss, batch) names the place"),
    "packing: lengths beside rows": (
        "step({'x': x, 'cu_seqlens': torch.arange(4), 'y': y})", "['cu_seqlens']: (4,)",
        "(packed lengths,"),
    "tasks: a branch": (
        CALL.format(BRANCH, "{'x': x, 'm': torch.arange(8) > 5}"), "a branch such as `if mask.any()`",
        "ab.Total for each term"),
    "tasks: tensors by name": (OWN.format("{'a': model(micro[0]).mean()}"), "{'a': 'Tensor'}", "ab.Total("),
    "images: mixup in the loss": (
        CALL.format("F.mse_loss(model(b['x']), b['x'][torch.randperm(len(b['x'])), :2])", ROWS),
        "mixes rows by them"),
    "images: a share drawn in the loss": (
        CALL.format("float(b['x'].sum()) * F.cross_entropy(model(b['x']), b['y'])", ROWS),
        "Draw a factor before the step, as mixup's"),
}  # fmt: skip
