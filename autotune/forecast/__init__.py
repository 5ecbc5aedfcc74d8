"""Forecasts of plans on devices that may not be here, without running them."""
