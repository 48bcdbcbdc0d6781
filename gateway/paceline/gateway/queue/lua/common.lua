-- Shared by every script. KEYS[1] is the key prefix with the model's hash tag; all keys begin with it.
--   :req:ID            hash: class priority tenant sequences kv_tokens owner state verifier epoch avoid
--   :reserved          zset: id by expiry (slots taken before tokenizing)
--   :waiting           zset: id by kv tokens
--   :classes           zset: classes with waiting requests, by priority
--   :tenants:CLASS     zset: tenants with waiting requests, by virtual service in tokens
--   :service:CLASS     zset: virtual service of every recent tenant
--   :q:CLASS:TENANT    zset: ids by deadline
--   :leases            zset: ids by expiry
--   :owner:OWNER       string with expiry: the gateway's heartbeat
--   :grants:OWNER      list: grants that the owner has not taken yet
-- Times are milliseconds of Redis' own clock. ARGV[1] overrides it when it is not 0 (tests).
local prefix = KEYS[1]
local function key(...) return prefix .. ':' .. table.concat({...}, ':') end
local now = tonumber(ARGV[1])
if now == 0 then
  local t = redis.call('TIME')
  now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local KEEP_MS = 3600000

local function waiting_tokens()
  local rows, total = redis.call('ZRANGE', key('waiting'), 0, -1, 'WITHSCORES'), 0
  for i = 2, #rows, 2 do total = total + tonumber(rows[i]) end
  return total
end

-- A tenant that comes back is lifted to the least served one that waits: no credit for time away.
local function line_up(id, class, priority, tenant, kv_tokens, score)
  local tenants = key('tenants', class)
  if not redis.call('ZSCORE', tenants, tenant) then
    local served = tonumber(redis.call('ZSCORE', key('service', class), tenant) or '0')
    local least = redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
    if least[2] and tonumber(least[2]) > served then served = tonumber(least[2]) end
    redis.call('ZADD', tenants, served, tenant)
    redis.call('ZADD', key('service', class), served, tenant)
    redis.call('PEXPIRE', key('service', class), KEEP_MS)
  end
  redis.call('ZADD', key('q', class, tenant), score, id)
  redis.call('ZADD', key('waiting'), kv_tokens, id)
  redis.call('ZADD', key('classes'), priority, class)
end

local function leave_line(id, class, tenant)
  redis.call('ZREM', key('q', class, tenant), id)
  redis.call('ZREM', key('waiting'), id)
  if redis.call('EXISTS', key('q', class, tenant)) == 0 then
    redis.call('ZREM', key('tenants', class), tenant)
    if redis.call('EXISTS', key('tenants', class)) == 0 then redis.call('ZREM', key('classes'), class) end
  end
end

local function charge(class, tenant, tokens)
  redis.call('ZINCRBY', key('service', class), tokens, tenant)
  redis.call('PEXPIRE', key('service', class), KEEP_MS)
  if redis.call('ZSCORE', key('tenants', class), tenant) then
    redis.call('ZINCRBY', key('tenants', class), tokens, tenant)
  end
end

local function tell(owner, id, verifier, epoch)
  redis.call('RPUSH', key('grants', owner), cjson.encode({id, verifier, epoch}))
  redis.call('PEXPIRE', key('grants', owner), KEEP_MS)
end
