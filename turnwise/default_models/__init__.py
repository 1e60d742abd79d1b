"""The models that `turnwise up` serves without `--model`: one is built here, the other comes from a package."""
