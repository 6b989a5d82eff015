"""Decide what FSDP gathers together; read stacks, blocks, policy, plan, rules, draft, steps, make_plan."""
