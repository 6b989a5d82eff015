"""What one GPU does with the package in minutes, beside plain loops, forecasts and published figures."""
