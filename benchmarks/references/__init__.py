"""What the product is compared with: other packers, solvers, samplers and trainers."""
