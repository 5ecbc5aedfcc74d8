"""The library behind `autotune pack INPUT`: pack a job or lengths, measure the balance, and write the packs."""
