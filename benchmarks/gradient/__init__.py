"""What does rounding add to a model's gradient, predicted and measured?"""
