"""What FSDP gathers together, as pure data; read stacks, blocks, policy, plan, rules, draft, steps, make_plan."""
