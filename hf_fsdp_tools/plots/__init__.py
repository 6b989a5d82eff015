"""Pictures of plans, steps and runs, by matplotlib, and pages that hold them."""
