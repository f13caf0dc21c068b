"""Floor 2: conversion and quantization. It works on files and reports progress."""
