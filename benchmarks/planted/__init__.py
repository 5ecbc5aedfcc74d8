"""Jobs with one planted cause of lost time each, on a machine that shares no formula with the predictions."""
