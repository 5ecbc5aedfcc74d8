"""Decides: reads the job, predicts, searches, launches and reports."""
