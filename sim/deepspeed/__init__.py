"""DeepSpeed's ZeRO-3: which weights its hooks gather and drop, and the program that follows from it."""
