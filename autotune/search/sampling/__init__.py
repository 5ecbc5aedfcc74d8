"""The next plan to try: the Optuna study, the acquisition function, and the pruner."""
