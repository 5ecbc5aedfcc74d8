"""The library behind `autotune pack`: pack a job or lengths, measure the balance, and write the packs."""
