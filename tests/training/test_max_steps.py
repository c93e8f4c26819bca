"""A run that ends by its number of steps, in mid-epoch, is validated like any other."""

from vision_attn.training.run_folder import read_metrics


def test_the_last_step_is_validated(make_run, tmp_path):
    run = make_run(tmp_path, max_steps=14, max_epochs=-1, check_val_every_n_epoch=5).fit()
    assert run.trainer.global_step == 14
    rows = read_metrics(run.folder.path / "metrics.csv")
    assert rows[-1]["step"] == 14
    assert "val/acc" in rows[-1]
