-- ARGV: now. Returns {waiting, waiting tokens, reserved, live leases, class, waiting of it, ...}.
local result = {
  redis.call('ZCARD', key('waiting')), waiting_tokens(),
  redis.call('ZCOUNT', key('reserved'), '(' .. now, '+inf'),
  redis.call('ZCOUNT', key('leases'), '(' .. now, '+inf'),
}
for _, class in ipairs(redis.call('ZRANGE', key('classes'), 0, -1)) do
  local count = 0
  for _, tenant in ipairs(redis.call('ZRANGE', key('tenants', class), 0, -1)) do
    count = count + redis.call('ZCARD', key('q', class, tenant))
  end
  table.insert(result, class)
  table.insert(result, count)
end
return result
