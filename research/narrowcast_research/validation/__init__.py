"""The predictor against what others and we have measured."""
