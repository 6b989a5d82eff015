"""What a model would be saved as, tensor by tensor: what each rank holds of it, and how it reaches who asks for it."""
